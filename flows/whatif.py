"""Advantages that another algorithm would have given."""
