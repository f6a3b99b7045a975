"""Training engine for any Hugging Face model, on PyTorch and FSDP2."""
