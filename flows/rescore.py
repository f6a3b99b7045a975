"""Committed samples graded again."""
