"""Generate functions, one a file, found by name."""
