"""From committed snapshots to arrays."""
