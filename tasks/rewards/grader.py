"""Interface between steps and graders, whether they run in processes (`pool`) or outside (`outside`)."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Protocol

from cairn.configs.kinds import ARGS, REWARD
from cairn.configs.plugins import BadPlugin
from cairn.configs.slime import Arguments
from cairn.tasks.rewards.sample import Sample

GRADER_OPTIONS = (
    "reward.rm_type",
    "reward.rm_type_key",
    "reward.custom_rm_path",
    "reward.custom_rm_model_path",
    "reward.group_rm",
    "reward.reward_key",
    "reward.rm_timeout",
    "reward.rm_memory",
    "reward.rm_batch_size",
    "reward.rm_url",
    "reward.judge",
    "reward.code",
)
"""Options that a step which grades samples reads for its graders, except those of a reward model."""


@dataclass(frozen=True)
class Graded:
    """Result of grading one sample. Without a reward the sample has failed, and `error` says why."""

    reward: float | None
    components: dict[str, Any] | None = None
    error: str | None = None
    tries: int = field(default=1, compare=False)
    """Number of times that the sample was graded."""
    waited: float = field(default=0.0, compare=False)
    """Seconds of waiting between these tries."""
    grader: str = field(default="", compare=False)
    """Name of the grader; empty where none graded the sample."""
    version: str = field(default="", compare=False)
    """Version of the grader."""


class Grading(Protocol):
    """Interface that grades batches. Thread-safe."""

    @property
    def name(self) -> str:
        """Name of the grader."""

    @property
    def version(self) -> str:
        """Version of the grader: it changes with the grader's code, and with what it calls outside and how."""

    @property
    def sees_whole_samples(self) -> bool:
        """Whether the grader reads more of a sample than response, label and metadata."""

    @property
    def sees_tokens(self) -> bool:
        """Whether the grader may read a sample's tokens, too.

        A grader that does not uses the text with special tokens only for the tags of thoughts in it: see
        `cairn.flows.history.rescore`.
        """

    @property
    def sees_messages(self) -> bool:
        """Whether the grader reads the prompt as the data row has it, too."""

    @property
    def by_group(self) -> bool:
        """Whether the grader grades whole groups."""

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch, and return the results in its order. `groups` are the groups of the samples.

        Raises:
            GraderUnavailable: the machine, or what the grader calls, did not let it work.
            GraderFailed: the grader cannot work at all.
        """

    def close(self) -> None:
        """End what the grader runs. A batch in flight raises GraderFailed."""


class Rememberable(Grading, Protocol):
    """A grader whose answers can be stored."""

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Return name and version of the grader of a sample. Raises BadPlugin where its row names a missing grader."""

    def can_grade(self, sample: Sample) -> None:
        """Receive a sample that got a reward before, perhaps in another process.

        Where samples fail, the grader grades this one again, to find out whether the samples or the grader are at
        fault.
        """


Grader = Callable[..., Any]

MODEL_PATH = "model_path"
"""Parameter of a reward model's constructor: `reward.custom_rm_model_path`."""


def constructor_arguments(path: str, grader: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the constructor of a grader that is a class, by the names of its parameters: `args`, and
    `model_path` or another name for `reward.custom_rm_model_path`. Raises BadPlugin where it needs others."""
    given: dict[str, Any] = {}
    for name, one in inspect.signature(grader).parameters.items():
        if name == ARGS:
            given[name] = Arguments(values)
        elif name in (MODEL_PATH, "model_name_or_path", "path") and MODEL_PATH in values:
            given[name] = values[MODEL_PATH]
        elif one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            hint = "set reward.custom_rm_model_path" if "path" in name else "give it a default"
            raise BadPlugin(f"the grader {path!r} needs {name} for its constructor{inspect.signature(grader)}: {hint}")
    return given


BOXED = "boxed_"
"""Prefix of the name of a built-in grader that gets the content of the last box in place of the response."""


OUTSIDE = ("code", "judge", "remote_rm", "reward_model")
"""Built-in graders that call something outside: see `cairn.tasks.grading.outside.kinds`."""


class TryAgain(Exception):
    """Raised by a grader: something that it calls does not respond now, and may do so later."""


class Takes(StrEnum):
    """Arguments of a grader."""

    TEXTS = "texts"
    """Response, label and metadata of one sample."""
    SAMPLE = "sample"
    """A whole sample."""
    SAMPLES = "samples"
    """A list of whole samples."""
    SLIME_SAMPLE = "args, sample"
    """Arguments as in slime: see `cairn.tasks.slime`."""
    SLIME_SAMPLES = "args, samples"
    """Arguments as in slime, with a list of samples."""
    VERL = "data_source, solution_str, ground_truth, extra_info"
    """Arguments as in verl: `data_source` of the row's metadata, response, label and metadata."""
    SOLUTION = "solution_str, ground_truth"
    """Response and label."""
    PROMPTS = "prompts, responses"
    """Texts of several prompts and of their responses."""

    @property
    def several(self) -> bool:
        """Whether one call grades several samples."""
        return self in (Takes.SAMPLES, Takes.SLIME_SAMPLES, Takes.PROMPTS)

    @property
    def of_slime(self) -> bool:
        """Whether the first argument is slime's `args`."""
        return self in (Takes.SLIME_SAMPLE, Takes.SLIME_SAMPLES)


@dataclass(frozen=True)
class NamedGrader:
    """Name, location, version and signature of a grader."""

    name: str
    path: str
    """Path for `cairn.configs.plugins.load_callable`."""
    version: str
    """Version, which changes whenever the grader's code does."""
    takes: Takes
    waits: bool
    """Whether the grader is a coroutine function."""
    wrong: float | None = None
    """Reward of a wrong answer, for a built-in grader that reads responses; also of an answer over which its process is
    lost. None: such a sample fails."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Values of `args` for a grader written for slime, and under `model_path` the folder of a reward model."""

    @property
    def boxed(self) -> bool:
        """Whether the grader gets the content of the last box in place of the response."""
        return self.path != self.name and self.name.startswith(BOXED)

    @property
    def whole_sample(self) -> bool:
        """Whether the grader takes `cairn.tasks.rewards.sample.Sample` in place of response, label and metadata."""
        return self.takes not in (Takes.TEXTS, Takes.VERL, Takes.SOLUTION)

    @property
    def sees_tokens(self) -> bool:
        """Whether the grader may read a whole sample's tokens too. Of the built-in ones only those that call something
        outside do."""
        return self.whole_sample and (self.path == self.name or self.name in OUTSIDE)


def share_of_right(reward: float, grader: str) -> float:
    """Return a grader's reward, or a mean of its rewards, as the share of right answers.

    It is 0 if all answers are wrong and 1 if all are right, whatever their rewards are.
    """
    wrong, right = paid(grader)
    return (reward - wrong) / (right - wrong)


@cache
def paid(grader: str) -> tuple[float, float]:
    """Return a grader's rewards of a wrong and of a right answer."""
    declaration = REWARD.built_in_declaration(grader.removeprefix(BOXED))
    return (0.0, 1.0) if declaration is None else declaration.pays
