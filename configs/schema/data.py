"""Where prompts come from and how a row becomes a prompt."""

import re
from typing import Any

from pydantic import Field, field_validator

from cairn.configs.schema.base import Section
from cairn.configs.schema.location import Location


def one_group(pattern: str | None) -> str | None:
    """A regular expression as it is, or nothing. ValueError where it is none, or has not exactly one group."""
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(f"needs exactly one group in parentheses, has {compiled.groups}")
    return pattern


class RowFormat(Section):
    """Where rows come from, and how one becomes a prompt, a label and metadata."""

    data_source_path: str = "files"
    """What gives the rows of `path`: `files` reads JSONL and Parquet, `csv` CSV; or a function of your own,
    `package.module.function` or `file.py:function`, see docs/plugins.md. slime: `--data-source-path`."""

    input_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. slime: `--input-key`."""

    label_key: str | None = "label"
    """Column with the expected answer; null when the reward needs none. slime: `--label-key`."""

    metadata_key: str | None = "metadata"
    """Column with a mapping that is handed to rewards and plug-ins; rows may lack it. slime: `--metadata-key`."""

    tool_key: str | None = None
    """Column with tool definitions for the chat template. slime: `--tool-key`."""

    label_pattern: str | None = None
    r"""Regular expression with one group that cuts the answer out of the label, such as `####\s*(.+)` for GSM8K."""

    apply_chat_template: bool = True
    """Render the prompt through the tokenizer's chat template; a string becomes one user message. slime:
    `--apply-chat-template`."""

    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`. slime: `--apply-chat-template-kwargs`."""

    @field_validator("label_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return one_group(pattern)


class DataConfig(RowFormat):
    """The training prompts."""

    path: Location
    """JSONL or Parquet file, on disk or at any fsspec URL, or whatever the data source takes; `path@[100:200]` takes a
    slice of its rows. slime: `--prompt-data`."""

    rollout_shuffle: bool = True
    """Draw the rows of each epoch in a new order, fixed by the run's seed. slime: `--rollout-shuffle`."""
