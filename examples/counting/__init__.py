"""A task whose answers are long-tailed: most are short, a few are ten times as long, and everything waits for them."""
