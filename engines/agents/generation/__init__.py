"""Built-in generate functions, one per file, selected by name."""
