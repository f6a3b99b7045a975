"""Maintenance of runs: verification, retention, redaction, garbage collection and deletion."""
