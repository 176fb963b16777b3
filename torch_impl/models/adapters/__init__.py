"""Adapters for other libraries, named after them; each imports its library only when it is used."""
