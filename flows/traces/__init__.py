"""Import of samples that other trainers recorded, one file a format, into a ledger."""
