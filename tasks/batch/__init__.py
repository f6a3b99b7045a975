"""Conversion of committed snapshots to arrays."""
