"""Everything that outlives a process: bytes, the ledger above them, logs, upkeep and SQL."""
