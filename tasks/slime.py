"""Functions written for slime, as ours: what they are given, in slime's shapes, and what they return, in ours.

Which functions those are tells their signature: `reward(args, sample)` and `my_filter(args, samples)`, plain or
coroutine functions, which may take more by keyword. Those that generate are in `cairn.engines.agents.slime`. What they
import of slime for their annotations and results comes from `cairn.slime` here."""

from dataclasses import dataclass, field
from typing import Any

from cairn.configs.slime import Arguments as Arguments
from cairn.configs.slime import Status as Status
from cairn.engines.agents import slime as generating
from cairn.tasks.rewards import sample as graders

_SAME_WORDS = "the same words earn the same, whichever sample they are; a filter has it"
_UNTOLD = {
    "index": _SAME_WORDS,
    "group_index": _SAME_WORDS,
    "loss_mask": "write a `grade(sample: cairn.Sample)`, whose `segments` say which tokens the policy sampled",
}


@dataclass
class Sample:
    """What slime's `Sample` says of a graded or gradable response. What a function writes into it is not kept: what it
    has to say it returns."""

    prompt: str = ""
    """As the model read it."""
    tokens: list[int] = field(default_factory=list)
    """Of prompt and response."""
    response: str = ""
    """As text, without special tokens."""
    response_length: int = 0
    """In tokens."""
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    """None before it is graded."""
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.COMPLETED

    def __getattr__(self, name: str) -> Any:
        """Only for what it has not."""
        if name in _UNTOLD:
            raise AttributeError(f"sample.{name} is not told to a grader: {_UNTOLD[name]}")
        raise AttributeError(f"sample.{name} is nothing here: docs/coming-from-slime.md says what a sample has")

    def get_reward_value(self, args: Any) -> float:
        """The number in a reward, which may be one entry of a mapping, `args.reward_key`."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward  # type: ignore[return-value]


@dataclass
class OfGroup(Sample):
    """One of a group, as a filter is given it."""

    group_index: int = 0
    """Counts the prompts that the run drew."""
    index: int = 0
    """Counts their samples."""
    loss_mask: list[int] = field(default_factory=list)
    """1 for the tokens of the response that may be trained on."""


generating.Sample.register(Sample)  # by the name under which functions know both
Sample.Status = Status  # type: ignore[attr-defined]  # as slime's functions name it


@dataclass
class DynamicFilterOutput:
    """What a filter says of a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def to_grade(sample: graders.Sample) -> Sample:
    """What a grader is given."""
    return Sample(
        prompt=sample.prompt,
        tokens=[*sample.prompt_ids, *sample.response_ids],
        response=sample.response,
        response_length=sample.length,
        label=sample.label,
        metadata=dict(sample.metadata),
        status=Status(sample.status),
    )
