"""Prompts and demonstrations: their sources, and the order in which a run draws them."""

from cairn.configs.errors import BadData
from cairn.tasks.data.demonstrations import DemonstrationData, DemonstrationRow
from cairn.tasks.data.drawing import MixedData, learns_from_results, next_prompts
from cairn.tasks.data.opening import Data, open_data
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.stream import Draw, GroupResult, StatefulPrompts, draw, order

__all__ = [
    "BadData",
    "Data",
    "DemonstrationData",
    "DemonstrationRow",
    "Draw",
    "GroupResult",
    "MixedData",
    "PromptData",
    "PromptRow",
    "StatefulPrompts",
    "draw",
    "learns_from_results",
    "next_prompts",
    "open_data",
    "order",
]
