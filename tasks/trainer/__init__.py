"""Steps that change or read the training engine: score, train, checkpoint, sync, recovery."""
