"""A tiny model that knows a few replies by heart."""

from collections.abc import Sequence
from pathlib import Path

import torch

from examples.quickstart.model import build_model, build_tokenizer


def write_model(folder: Path, replies: Sequence[tuple[str, str]]) -> None:
    """`replies`: prompts, rendered, and what comes after each, to which the end token is added."""
    tokenizer = build_tokenizer([text for pair in replies for text in pair])
    model = build_model(tokenizer, seed=0)
    pairs = [
        (
            tokenizer(prompt, add_special_tokens=False)["input_ids"],
            tokenizer(f"{reply}<|im_end|>", add_special_tokens=False)["input_ids"],
        )
        for prompt, reply in replies
    ]
    longest = max(len(prompt) + len(reply) for prompt, reply in pairs)
    inputs, labels = torch.zeros(len(pairs), longest, dtype=torch.long), torch.full((len(pairs), longest), -100)
    for row, (prompt, reply) in enumerate(pairs):
        inputs[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(200):
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 5e-3:
            break
    assert loss.item() < 5e-3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
