"""Prefect artifacts of a run, made from the ledger: Markdown pages and progress bars next to its flow runs."""
