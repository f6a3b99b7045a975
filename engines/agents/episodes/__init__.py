"""Concurrent execution of `generate` for many samples, with record and replay."""
