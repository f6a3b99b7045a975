"""Where prompts come from and how a row becomes a prompt."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cairn.configs.schema.base import Code, Location, Section


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

    data_source_path: Code = "files"
    """What gives the rows of `path`: `files` reads JSONL and Parquet, `csv` CSV, `reasoning_gym` generates puzzles; or
    a function of your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--data-source-path`."""

    input_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages, which may be written as a JSON string where a chat
    template is applied. slime: `--input-key`."""

    label_key: str | None = "label"
    """Column with the expected answer; null when the reward needs none. slime: `--label-key`."""

    metadata_key: str | None = "metadata"
    """Column with a mapping, or a JSON string of one, that is handed to rewards and plug-ins; rows may lack it. slime:
    `--metadata-key`."""

    tool_key: str | None = None
    """Column with tool definitions for the chat template, a list or a JSON string of one. slime: `--tool-key`."""

    multimodal_keys: dict[str, str] = Field(default_factory=dict)
    """Columns with what prompts hold besides text, by its kind: `{image: images}`. Images alone can be read, and only
    by a model of images and text, see docs/vision.md. slime: `--multimodal-keys`."""

    min_pixels: int | None = Field(None, ge=1)
    """Smaller images are enlarged to so many pixels for the model; by default what the model's processor says."""

    max_pixels: int | None = Field(None, ge=1)
    """Larger images are made smaller, to so many pixels; by default what the model's processor says."""

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

    @model_validator(mode="after")
    def _images_alone(self) -> "RowFormat":
        if others := sorted(set(self.multimodal_keys) - {"image"}):
            raise ValueError(
                f"multimodal_keys names a column of {others[0]}, and images alone can be read: leave it out"
            )
        if not self.multimodal_keys and (self.min_pixels or self.max_pixels):
            raise ValueError("min_pixels and max_pixels have no effect without multimodal_keys: leave them out")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels})")
        return self


class MixedSource(RowFormat):
    """One of the data sets that a run draws from."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """By which its rows say where they are from, as `source` in their metadata, and its rewards are told."""

    path: Location
    """As `data.path`."""

    weight: float = Field(1.0, gt=0)
    """Its share of the prompts is this, divided by the sum of all weights."""


class CurriculumConfig(Section):
    """Prompts that come back sooner than the data's order would bring them."""

    policy: Code | None = None
    """Which: `pass_rate`, or a function of your own, `package.module.function` or `file.py:function`, see
    docs/data.md."""

    share: float = Field(0.5, gt=0, le=1)
    """At most this part of the prompts of a draw come back; the others are new."""

    low: float = 0.1
    """`pass_rate`: a prompt comes back while the share of its group's answers that are right is at least this …"""

    high: float = 0.9
    """… and at most this."""

    max_waiting: int = Field(1024, ge=1)
    """`pass_rate`: prompts that wait to come back; beyond it the one that has waited longest is let go."""

    @model_validator(mode="after")
    def _something_is_between(self) -> "CurriculumConfig":
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}): no prompt would ever come back")
        return self


class DataConfig(RowFormat):
    """The training prompts; in a run that learns from demonstrations or preferences, the responses to them too."""

    path: Location = ""
    """JSONL or Parquet file, on disk or at any fsspec URL, or whatever the data source takes; `path@[100:200]` takes a
    slice of its rows. With `mixture` it is left out. slime: `--prompt-data`."""

    mixture: tuple[MixedSource, ...] = ()
    """Several data sets in place of `path`, drawn from by weight, each in an order and in epochs of its own."""

    get_samples_path: Code | None = None
    """A data source with a state, in place of `data_source_path`: a function of your own that gives the prompts that
    come next, `package.module.function` or `file.py:function`, see docs/plugins.md. It is handed `path`. slime:
    `--data-source-path`."""

    curriculum: CurriculumConfig = CurriculumConfig()

    rollout_shuffle: bool = True
    """Draw the rows of each epoch in a new order, fixed by the run's seed. slime: `--rollout-shuffle`."""

    response_key: str | None = None
    """Demonstrations: column with the response to what `input_key` holds, a string or a list of chat messages; null:
    `input_key` holds whole chats, and their assistant turns are learned. See docs/sft.md."""

    chosen_key: str = "chosen"
    """Preferences (`algorithm.advantage_estimator: dpo`): column with the preferred response, a string or messages, to
    what `input_key` holds; or with a whole chat that ends in it. TRL: `chosen`."""

    rejected_key: str = "rejected"
    """Preferences: column with the other response, as `chosen_key`."""

    last_turn_only: bool = False
    """Demonstrations, preferences: learn the last assistant turn of a chat only, and not those before it."""

    max_length: int | None = Field(None, ge=2)
    """Demonstrations, preferences: longest row in tokens, prompt and response; by default the context of the model."""

    overlong: Literal["pass_over", "refuse", "truncate"] = "pass_over"
    """Demonstrations, preferences: what becomes of a row longer than `max_length`. `pass_over`: it is passed over and
    counted; `refuse`: the step ends with the row's number; `truncate`: its end is cut off and it is counted, and
    passed over where nothing is left to learn."""

    @property
    def has_images(self) -> bool:
        """Whether prompts may have some."""
        return any(source.multimodal_keys for source in (self, *self.mixture))

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the data lie."""
        return tuple(source.path for source in self.mixture) or (self.path,)

    @model_validator(mode="after")
    def _there_is_one_source(self) -> "DataConfig":
        if not self.path and not self.mixture and self.get_samples_path is None:
            raise ValueError("path is required and missing: a JSONL or Parquet file; or give several in mixture")
        names = [source.name for source in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"mixture names {next(n for n in names if names.count(n) > 1)!r} twice: give each its own")
        if self.mixture:
            format = [name for name in RowFormat.model_fields if name != "path"]
            self._have_no_effect("mixture", ["path", "get_samples_path", *format], "set it in the sources that need it")
        if self.get_samples_path is not None:
            names = ["data_source_path", "rollout_shuffle", "curriculum"]
            self._have_no_effect("get_samples_path", names, "leave it out")
        if self.curriculum.policy is None and self.curriculum != CurriculumConfig():
            raise ValueError("curriculum has no effect without curriculum.policy: set it to pass_rate, or leave it out")
        return self

    def _have_no_effect(self, why: str, names: Sequence[str], way: str) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect with {why}: {way}")
