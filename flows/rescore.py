"""Grading of committed samples with another grader."""
