"""Bytes under a root: exclusive create, local files, S3, signing."""
