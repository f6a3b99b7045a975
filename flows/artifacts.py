"""What Prefect's interface shows of a run besides its flow runs: pages and progress, made from the ledger."""
