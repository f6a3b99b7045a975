"""Durable state: byte stores, the ledger above them, logs, upkeep and SQL queries."""
