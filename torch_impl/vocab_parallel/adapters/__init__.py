"""Names of other libraries' pages over the functions of this package: their signatures, nothing computed here."""
