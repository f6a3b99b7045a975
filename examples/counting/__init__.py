"""A task whose answers are long-tailed: most are short, and a few are ten times as long."""
