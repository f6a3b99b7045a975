"""Child processes: sandboxes, ports and fingerprints."""
