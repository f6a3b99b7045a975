"""Configuration of a run: its schema, its recipes, and the code that loads, checks and digests them."""
