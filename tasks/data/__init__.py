"""Prompts and demonstrations: where they are read from, and in which order a run draws them."""

from cairn.tasks.data.demonstrations import DemonstrationData, DemonstrationRow
from cairn.tasks.data.drawing import learns_from_results, next_prompts
from cairn.tasks.data.errors import BadData
from cairn.tasks.data.given_prompts import GivenPrompts
from cairn.tasks.data.mixture import MixedData
from cairn.tasks.data.opening import Data, open_data
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.results import GroupResult
from cairn.tasks.data.stream import Draw, DrawnRow, draw, order

__all__ = [
    "BadData",
    "Data",
    "DemonstrationData",
    "DemonstrationRow",
    "Draw",
    "DrawnRow",
    "GivenPrompts",
    "GroupResult",
    "MixedData",
    "PromptData",
    "PromptRow",
    "draw",
    "learns_from_results",
    "next_prompts",
    "open_data",
    "order",
]
