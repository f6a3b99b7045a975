"""Resource needs of a recipe, computed before any machine is used."""
