"""The ledger: commits, leases, manifests, schemas and decisions."""
