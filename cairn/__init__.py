"""Cairn: durable reinforcement learning for language models. What user code imports is here; all else is below it."""
