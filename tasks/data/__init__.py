"""Prompts: where they are read from, and in which order a run draws them."""

from cairn.tasks.data.errors import BadData
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.stream import Draw, DrawnRow, draw, order

__all__ = ["BadData", "Draw", "DrawnRow", "PromptData", "PromptRow", "draw", "order"]
