"""Environments of the field: what episodes reach by protocols that others have made."""
