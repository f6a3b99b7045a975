"""The parts of a sample that a grader may see."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.storage.store.canonical import from_json


@dataclass(frozen=True)
class ResponseSegment:
    """Tokens of a response that were added at once."""

    ids: tuple[int, ...]
    text: str
    """Text of the tokens, special ones included."""
    sampled: bool
    """Whether the policy sampled the tokens; else they come from the environment, such as the result of a tool or the
    next question."""
    trajectory: int = 0
    """Index of the sample's trajectory that has these tokens, from 0."""
    reward: float | None = None
    """Reward that user code returned for this turn during generation; None without one."""


@dataclass(frozen=True)
class Sample:
    """A generated response and its prompt. Failed and unfinished samples are never graded. If there are several
    trajectories, the last one is the response."""

    response: str
    """Text without special tokens."""
    label: str | None
    """Expected answer, from the data row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of the data row; empty where it has none."""
    response_with_special_tokens: str = ""
    """Text with the end token and all other special tokens of the tokenizer, such as `</think>` of some models."""
    response_ids: tuple[int, ...] = ()
    """Tokens of the response, the end token included."""
    prompt: str = ""
    """Text that the model read, chat template and special tokens included."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt."""
    finish_reason: str = "stop"
    """`stop`: the model ended its response. `length`: it was cut off at the maximum length, or at the end of the
    context."""
    status: str = "completed"
    """`completed` or `truncated`: `cairn.storage.ledger.schemas.Status`."""
    segments: tuple[ResponseSegment, ...] = ()
    """All tokens after the prompt, in order, of every trajectory; empty where the policy sampled the response at
    once."""

    messages: tuple[dict[str, Any], ...] = ()
    """Prompt as the data row has it: the messages of a chat, or one user message for a plain text. Only for the grader
    `reward_model`; empty for others."""
    rewards: tuple[float | None, ...] = ()
    """Reward of each trajectory that user code returned during generation, directly or by turns; empty where there is
    none."""
    roles: tuple[str | None, ...] = ()
    """Role of each trajectory; empty where none has one."""
    infos: tuple[dict[str, Any] | None, ...] = ()
    """Values that user code set for each trajectory during generation (`cairn.Trajectory.info`); empty where there are
    none."""

    @property
    def length(self) -> int:
        """Number of tokens of the response."""
        return len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off: it might have continued after its last words."""
        return self.finish_reason == "length"


def read_infos(written: Sequence[str | None] | None) -> tuple[dict[str, Any] | None, ...]:
    """Return `infos` from the JSON of each."""
    return tuple(None if one is None else from_json(one) for one in written or ())


def required_label(sample: Sample, grader: str) -> str:
    """Return the label of a sample. Raises ValueError without one."""
    if sample.label is None:
        raise ValueError(f"{grader} needs a label, and the row has none")
    return sample.label
