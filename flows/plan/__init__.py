"""What a recipe needs of machines, before any of them is asked."""
