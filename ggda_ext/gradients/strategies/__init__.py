"""One file per strategy; all give the same numbers."""
