"""Options of the data: sources of prompts, and the conversion of rows into prompts."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cairn.configs.schema.base import Code, DataPath, FromStore, Section, Text, rule
from cairn.configs.schema.effect import SAMPLED, learned_from, when


def one_group(pattern: str | None) -> str | None:
    """Return a regular expression unchanged, or None. Raises ValueError where it is invalid or has not exactly one
    group."""
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(f"needs exactly one group in parentheses, has {compiled.groups}")
    return pattern


_IMAGES = when("data.multimodal_keys", remedy="set data.multimodal_keys")


class RowFormat(Section):
    """Source of rows, and their conversion into a prompt, a label and metadata."""

    data_source_path: Code = "files"
    """Data source that reads the rows of `path`. `files`: JSONL and Parquet. `csv`: CSV. `reasoning_gym`: generates
    puzzles. Or a function of your own, `package.module.function` or `file.py:function`, see docs/plugins.md. slime:
    `--data-source-path`."""

    input_key: Text = "prompt"
    """Column with the prompt: a string or a list of chat messages. Where a chat template is applied, the list may also
    be a JSON string. slime: `--input-key`."""

    label_key: Text | None = "label"
    """Column with the expected answer; null where the grader needs none. slime: `--label-key`."""

    metadata_key: Text | None = "metadata"
    """Column with a mapping, or a JSON string of one, that graders and plug-ins get. Rows may lack it. slime:
    `--metadata-key`."""

    tool_key: Text | None = None
    """Column with tool definitions for the chat template, a list or a JSON string of one. slime: `--tool-key`."""

    multimodal_keys: dict[Text, Text] = Field(default_factory=dict)
    """Columns with other inputs of a prompt than text, by their kind: `{image: images}`. Only images are supported, and
    only with a model of images and text, see docs/vision.md. slime: `--multimodal-keys`."""

    min_pixels: Annotated[int | None, _IMAGES] = Field(None, ge=1)
    """Smaller images are enlarged to this number of pixels; by default that of the model's processor."""

    max_pixels: Annotated[int | None, _IMAGES] = Field(None, ge=1)
    """Larger images are reduced to this number of pixels; by default that of the model's processor."""

    label_pattern: Text | None = None
    r"""Regular expression with one group that extracts the answer from the label, such as `####\s*(.+)` for GSM8K."""

    apply_chat_template: bool = True
    """Render the prompt through the tokenizer's chat template; a string becomes one user message. slime:
    `--apply-chat-template`."""

    apply_chat_template_kwargs: Annotated[dict[str, Any], FromStore.TEMPLATE_ARGUMENTS] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`. slime: `--apply-chat-template-kwargs`."""

    @field_validator("label_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return one_group(pattern)

    @rule
    def _images_alone(self) -> None:
        if others := sorted(set(self.multimodal_keys) - {"image"}):
            raise ValueError(
                f"multimodal_keys names a column of {others[0]}, but only images can be read: leave it out"
            )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels})")


class MixedSource(RowFormat):
    """A data set of a mixture."""

    name: Text = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Name of the data set. Its rows have it as `source` in their metadata, and its rewards are reported in the metric
    `rollout/source/<name>/raw_reward`."""

    path: DataPath
    """JSONL or Parquet file, or another input of the data source, as in `data.path`."""

    weight: float = Field(1.0, gt=0)
    """Weight of the data set. Its share of the prompts is this, divided by the sum of all weights."""


class CurriculumConfig(Section):
    """Prompts that are repeated earlier than in the data's order."""

    policy: Code | None = None
    """Choice of the prompts that are repeated: `pass_rate`, or a function of your own, `package.module.function` or
    `file.py:function`, see docs/data.md. Null repeats none."""

    share: float = Field(0.5, gt=0, le=1)
    """Largest share of repeated prompts in a draw; the others are new."""

    low: float = 0.1
    """`pass_rate`: smallest share of correct answers in its group with which a prompt is repeated."""

    high: float = 0.9
    """`pass_rate`: largest share of correct answers in its group with which a prompt is repeated."""

    max_waiting: int = Field(1024, ge=1)
    """`pass_rate`: largest number of prompts that wait to be repeated. Beyond it the one that has waited longest is
    dropped."""

    @rule
    def _something_is_between(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}): no prompt would be drawn again")


class DataConfig(RowFormat):
    """Training prompts. In a run that learns from demonstrations or preferences the rows also hold the responses."""

    path: DataPath = ""
    """JSONL or Parquet file, on disk or at any fsspec URL, or another input of the data source. `path@[100:200]` takes
    a slice of its rows. Left out with `mixture`. slime: `--prompt-data`."""

    mixture: Annotated[tuple[MixedSource, ...], SAMPLED] = ()
    """Several data sets in place of `path`, sampled by weight. Each has its own order and its own epochs."""

    get_samples_path: Annotated[Code | None, SAMPLED] = None
    """Data source with a state, in place of `data_source_path`: a function of your own that returns the next prompts,
    `package.module.function` or `file.py:function`, see docs/plugins.md. Its argument is `path`. slime:
    `--data-source-path`."""

    curriculum: Annotated[
        CurriculumConfig, SAMPLED, when("data.curriculum.policy", remedy="set data.curriculum.policy=pass_rate")
    ] = CurriculumConfig()

    rollout_shuffle: bool = True
    """Shuffle the rows of each epoch, in an order that the run's seed determines. slime: `--rollout-shuffle`."""

    response_key: Annotated[Text | None, learned_from("demonstrations")] = None
    """Demonstrations: column with the response to the prompt in `input_key`, a string or a list of chat messages. Null:
    `input_key` holds whole chats, whose assistant turns are trained on. See docs/sft.md."""

    chosen_key: Annotated[Text, learned_from("preferences")] = "chosen"
    """Preferences (`algorithm.advantage_estimator: dpo`): column with the preferred response to the prompt in
    `input_key`, a string or messages; or with a whole chat that ends in this response. TRL: `chosen`."""

    rejected_key: Annotated[Text, learned_from("preferences")] = "rejected"
    """Preferences: column with the other response, in the form of `chosen_key`."""

    last_turn_only: Annotated[bool, learned_from("demonstrations", "preferences")] = False
    """Demonstrations, preferences: train on the last assistant turn of a chat only, and not on those before it."""

    max_length: Annotated[int | None, learned_from("demonstrations", "preferences")] = Field(None, ge=2)
    """Demonstrations, preferences: longest row in tokens, prompt and response together; by default the model's
    context."""

    overlong: Annotated[Literal["pass_over", "refuse", "truncate"], learned_from("demonstrations", "preferences")] = (
        "pass_over"
    )
    """Demonstrations, preferences: handling of a row longer than `max_length`. `pass_over`: skip and count it.
    `refuse`: end the step with an error that names the row. `truncate`: cut off its end and count it; skip it where
    nothing is left to train on."""

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return any(source.multimodal_keys for source in (self, *self.mixture))

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all data sets."""
        return tuple(source.path for source in self.mixture) or (self.path,)

    @rule
    def _there_is_one_source(self) -> None:
        if not self.path and not self.mixture and self.get_samples_path is None:
            raise ValueError("path is required and missing: a JSONL or Parquet file; or give several in mixture")
        names = [source.name for source in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(
                f"mixture names {next(n for n in names if names.count(n) > 1)!r} twice: give each source its own name"
            )
        if self.mixture:
            format = [name for name in RowFormat.model_fields if name != "path"]
            self._have_no_effect("mixture", ["path", "get_samples_path", *format], "set it in the sources that need it")
        if self.get_samples_path is not None:
            names = ["data_source_path", "rollout_shuffle", "curriculum"]
            self._have_no_effect("get_samples_path", names, "leave it out")

    def _have_no_effect(self, why: str, names: Sequence[str], way: str) -> None:
        for name in names:
            if getattr(self, name) != self.default_of(name):
                raise ValueError(f"{name} has no effect with {why}: {way}")
