"""Verify, retain, redact, collect and delete."""
