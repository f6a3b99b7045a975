"""What a grader may see of a sample."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ResponseSegment:
    """Tokens of a response that came at once."""

    ids: tuple[int, ...]
    text: str
    """The tokens, special ones included."""
    sampled: bool
    """Whether the policy sampled them; else the world gave them, as the result of a tool or the next question."""
    trajectory: int = 0
    """Which of the sample's trajectories they are of, from 0."""
    reward: float | None = None
    """That user code gave this turn while it generated; None: none."""


@dataclass(frozen=True)
class Sample:
    """One generated response and what it answers. Not one that failed or was left unfinished: nobody grades those. Of
    several trajectories the last one is the response."""

    response: str
    """As text, without special tokens."""
    label: str | None
    """The expected answer, as the data row has it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the data row; empty where it has none."""
    response_with_special_tokens: str = ""
    """As text, with the end token and all others that the tokenizer counts as special, such as a model's `</think>`."""
    response_ids: tuple[int, ...] = ()
    """Its tokens, the end token included."""
    prompt: str = ""
    """As the model read it, chat template and special tokens included."""
    prompt_ids: tuple[int, ...] = ()
    """Its tokens."""
    finish_reason: str = "stop"
    """`stop`: the model ended its response. `length`: it was cut at the longest length allowed, or at the end of the
    context."""
    status: str = "completed"
    """`completed` or `truncated`: `cairn.storage.ledger.schemas.Status`."""
    segments: tuple[ResponseSegment, ...] = ()
    """All that came after the prompt, in order, of every trajectory; empty where the policy sampled the response at
    once."""

    messages: tuple[dict[str, Any], ...] = ()
    """The prompt as the data row has it: the messages of a chat, of a plain text one of a user. For the grader
    `reward_model`; empty for others."""
    rewards: tuple[float | None, ...] = ()
    """That user code gave each trajectory while it generated, itself or by its turns; empty where it gave none."""
    roles: tuple[str | None, ...] = ()
    """Of each trajectory; empty where none has one."""

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut: its last words may not be what they were going to be."""
        return self.finish_reason == "length"
