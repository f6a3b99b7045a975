"""Opening of the data that a run trains on."""

from functools import partial
from pathlib import Path
from typing import Any

from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.slime import values_read
from cairn.tasks.data.demonstrations import DemonstrationData
from cairn.tasks.data.drawing import MixedData, Prompts
from cairn.tasks.data.prompts import Check, PromptData
from cairn.tasks.data.stream import StatefulPrompts

# Tools of a run, for its prompts and its steps.


def template_tools(rollout: RolloutConfig) -> list[Any] | None:
    """Return the tool schemas of `rollout.tools` for chat templates; None if templates get none. Raises BadPlugin."""
    if not rollout.tools or rollout.tool_call_format != "template":
        return None
    from cairn.engines.agents.tools.tool import load_tools

    return [tool.schema for tool in load_tools(rollout.tools, rollout.tool_options).values()]


def search_corpus(rollout: RolloutConfig) -> Path | None:
    """Return the corpus of the tool `search`; None if none is configured."""
    corpus = rollout.tool_options.search.corpus if "search" in rollout.tools else None
    return None if corpus is None else Path(corpus).expanduser()


Data = Prompts | DemonstrationData


def open_data(config: RunConfig, tokenizer: Any, check: Check | None = None) -> Data:
    """Open the prompts, or the rows with responses, that the algorithm learns from. Raises BadData and BadModel.

    Args:
        check: called with the metadata of each row of prompts, for example `cairn.tasks.grading.graders.row_check`.
    """
    data, workers = config.data, config.rollout.num_data_workers
    if config.samples_responses and data.get_samples_path is not None:
        return StatefulPrompts(data, tokenizer, template_tools(config.rollout), partial(values_read, config))
    if config.samples_responses and data.mixture:
        return MixedData.open(data.mixture, tokenizer, check, template_tools(config.rollout), workers)
    if config.samples_responses:
        return PromptData.open(data, data.path, tokenizer, check, template_tools(config.rollout), workers)
    from cairn.engines.models.configs import context_length
    from cairn.engines.models.folders import check_model_folder, end_tokens  # PyTorch takes seconds to import

    return DemonstrationData.open(
        data,
        data.path,
        tokenizer,
        data.max_length or context_length(check_model_folder(config.model.path)),
        pairs=config.algorithm.learns_from == "preferences",
        model_ends=end_tokens(config.model.path),
    )
