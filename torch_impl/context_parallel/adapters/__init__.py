"""Other libraries, by their own names; nothing here is imported where they are not installed."""
