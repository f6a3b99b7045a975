"""Byte stores: exclusive creation, local files, S3 and signing."""
