"""Adapters for functions written for slime: inputs in slime's shapes, results in Cairn's.

A function's signature identifies it: `reward(args, sample)` and `my_filter(args, samples)`, plain or coroutine
functions, which may take more by keyword. Functions that generate are in `cairn.engines.agents.slime`. `cairn.slime`
provides what they import from slime for their annotations and results."""

from dataclasses import dataclass, field
from typing import Any

from cairn.configs.slime import Arguments as Arguments
from cairn.configs.slime import Status as Status
from cairn.configs.slime import as_in_row
from cairn.engines.agents import slime as generating
from cairn.tasks.rewards import sample as graders

_SAME_WORDS = "the same text gets the same reward in any sample; a filter has it"
_UNAVAILABLE = {
    "index": _SAME_WORDS,
    "group_index": _SAME_WORDS,
    "loss_mask": "write a `grade(sample: cairn.Sample)`, whose `segments` say which tokens the policy sampled",
}


@dataclass
class Sample:
    """Fields of slime's `Sample` for a response that is or can be graded, and the attributes that the generate function
    set. What a function writes into it is lost, but for `remove_sample` of a filter: its return value counts."""

    prompt: str = ""
    """Prompt as the model read it."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of prompt and response."""
    response: str = ""
    """Response as text, without special tokens."""
    response_length: int = 0
    """Response tokens."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    """Reward; None before grading."""
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.COMPLETED
    remove_sample: bool = False
    """Whether a filter of samples takes it out of the loss."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with an explanation. Python calls this for missing attributes only."""
        if name in _UNAVAILABLE:
            raise AttributeError(f"sample.{name} is not passed to a grader: {_UNAVAILABLE[name]}")
        raise AttributeError(
            f"sample.{name} does not exist here: docs/coming-from-slime.md lists the fields of a sample"
        )

    def get_reward_value(self, args: Any) -> float:
        """Return the number in a reward. If the reward is a mapping, it is the entry `args.reward_key`."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward  # type: ignore[return-value]


@dataclass
class GroupSample(Sample):
    """Sample of a group, as a filter receives it."""

    group_index: int = 0
    """Number of the prompt among those that the run drew."""
    index: int = 0
    """Number of the sample among those of all prompts."""
    loss_mask: list[int] = field(default_factory=list)
    """1 for the response tokens that may be trained on."""


generating.Sample.register(Sample)  # by the name under which functions know both
Sample.Status = Status  # type: ignore[attr-defined]  # as slime's functions name it


@dataclass
class DynamicFilterOutput:
    """Verdict of a filter on a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def to_grade(sample: graders.Sample) -> Sample:
    """Return the sample that a grader receives, with what the generate function wrote into it."""
    own = Sample(
        prompt=sample.prompt,
        tokens=[*sample.prompt_ids, *sample.response_ids],
        response=sample.response,
        response_length=sample.length,
        label=as_in_row(sample.label),
        metadata=dict(sample.metadata),
        status=Status(sample.status),
    )
    vars(own).update((sample.infos and sample.infos[-1]) or {})
    return own
