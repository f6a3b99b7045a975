"""A tiny reward model of a real architecture."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification


def write_reward_model(folder: Path, tokenizer_of: Path, labels: int = 1, seed: int = 0) -> Path:
    """A random Qwen3 classifier with the tokenizer of another model folder; returns its folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        num_labels=labels,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
