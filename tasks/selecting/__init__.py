"""`filter`: which groups are trained on, and the policies that decide."""
