"""Adapters for other libraries, by the names of those libraries; each imports its library only when it is used."""
