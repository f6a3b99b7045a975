"""Training engines: score, update exactly once, save and restore."""
