"""Tensors in buckets, and their checksums."""
