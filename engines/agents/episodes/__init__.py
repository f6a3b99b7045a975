"""Run `generate` for many samples at once, with record and replay."""
