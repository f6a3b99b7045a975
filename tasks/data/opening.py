"""The data that a run trains on."""

from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.tasks.data.demonstrations import DemonstrationData
from cairn.tasks.data.drawing import Prompts
from cairn.tasks.data.given_prompts import GivenPrompts
from cairn.tasks.data.mixture import MixedData
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.tools import told_tools
from cairn.tasks.rewards.rows import row_check

Data = Prompts | DemonstrationData


def open_data(config: RunConfig, tokenizer: Any, is_new: bool = False) -> Data:
    """Prompts, or rows that hold responses too, as the algorithm learns from. `is_new`: for a run that begins. Raises
    BadData and BadModel."""
    data = config.data
    if config.samples_responses and data.get_samples_path is not None:
        return GivenPrompts(data, tokenizer, told_tools(config.rollout))
    if config.samples_responses and data.mixture:
        check = row_check(config.reward, is_new)
        return MixedData.open(data.mixture, tokenizer, check, told_tools(config.rollout), is_new)
    if config.samples_responses:
        check = row_check(config.reward, is_new)
        return PromptData.open(data, data.path, tokenizer, check, told_tools(config.rollout), is_new)
    from cairn.engines.models import check_model_folder, context_length, end_tokens  # PyTorch takes seconds to import

    return DemonstrationData.open(
        data,
        data.path,
        tokenizer,
        data.max_length or context_length(check_model_folder(config.model.path)),
        pairs=config.algorithm.learns_from == "preferences",
        model_ends=end_tokens(config.model.path),
    )
