"""Evaluation apart from any run's own: what any weights get at any benchmark, found out once and kept in `evals/`."""
