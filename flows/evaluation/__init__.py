"""Evaluation apart from any run: scores of any weights at any benchmark, computed once and stored in `evals/`."""
