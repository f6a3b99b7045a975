"""The ledger of a run: commits, leases, manifests, schemas and decisions."""
