"""The production training engine, on megatron-core."""
