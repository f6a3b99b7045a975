"""Production training engine, on megatron-core."""
