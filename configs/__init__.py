"""What a run is told: its schema, recipes, and what loads, checks and digests them."""
