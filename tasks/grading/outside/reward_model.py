"""The grader `reward_model`: a sequence classifier with one label rates a response, on an engine of its own.

A failure of the engine fails no sample: the step is retried, with the engine restarted, and then the run ends. A sample
fails only by itself: it is longer than the model reads, the template refuses its chat, or its score is not finite.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardModelConfig
from cairn.engines.types.errors import GraderFailed
from cairn.tasks.grading.outside.service import source_version
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample

if TYPE_CHECKING:
    from cairn.configs.schema.reward import RewardConfig
    from cairn.engines.scoring.reward_model import PromptAndResponse, Score

NAME = "reward_model"

BATCHES = 8
"""Batches of one call. An engine that dies loses at most these."""


class Scorer(Protocol):
    """Interface of the engine: `cairn.engines.scoring.reward_model.RewardModel`, or its handle in a fleet."""

    def score(self, answered: Sequence["PromptAndResponse"]) -> list["Score"]:
        """Return the scores, in order."""


class RewardModelGrader:
    """A grader that calls the engine. Thread-safe."""

    name = NAME
    by_group = False
    sees_whole_samples = True
    sees_tokens = True
    sees_messages = True

    def __init__(self, config: "RewardConfig", engine: Callable[[], Scorer] | None = None) -> None:
        """Prepare the grader. Raises BadPlugin where no model is named, or its folder cannot be used.

        Args:
            engine: returns the engine of a fleet once it is up. Without it the first sample loads the model into this
                process.
        """
        self._options = options_of(config)
        self.version = version_of(self._options)
        self._engine = engine
        self._own: Scorer | None = None
        self._loading = threading.Lock()
        self._closed = False

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch: see `Grading.grade`. Raises EngineError where the engine fails."""
        from cairn.engines.scoring.reward_model import PromptAndResponse

        pairs = []
        for sample in samples:
            if not sample.messages:
                raise GraderFailed("the grader reward_model needs the prompts of the data rows, but received none")
            pairs.append(PromptAndResponse(sample.messages, _text(sample), sample.response))
        scores: list[Score] = []
        size = BATCHES * self._options.batch_size
        for start in range(0, len(pairs), size):
            if self._closed:
                raise GraderFailed(f"the grader {self.name} is closed")
            scores += self._scorer().score(pairs[start : start + size])
        return [
            Graded(one.value, {"tokens": one.tokens}, one.error, grader=self.name, version=self.version)
            for one in scores
        ]

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Return name and version of this grader."""
        return self.name, self.version

    def can_grade(self, sample: Sample) -> None:
        """Do nothing: a failure of the engine fails no sample."""

    def close(self) -> None:
        """Release the engine. An engine of a fleet ends with the fleet."""
        self._closed = True
        self._own = None

    def _scorer(self) -> Scorer:
        if self._engine is not None:
            return self._engine()
        with self._loading:
            if self._own is None:
                from cairn.engines.scoring.reward_model import RewardModel

                self._own = RewardModel(self._options)
            return self._own


def options_of(config: "RewardConfig") -> RewardModelConfig:
    """Return the options of the model. Raises BadPlugin where none is named."""
    if config.reward_model is None:
        raise BadPlugin("the grader 'reward_model' needs a model: set reward.reward_model.path to its folder")
    return config.reward_model


def version_of(options: RewardModelConfig) -> str:
    """Return a version that changes with what the model reads and with the digest of its folder's files.

    Raises BadPlugin where the folder cannot be used.
    """
    from cairn.engines.models.files import loaded_files
    from cairn.engines.scoring.reward_model import load_reward_tokenizer
    from cairn.engines.types.errors import BadModel

    try:
        load_reward_tokenizer(options.path)
    except BadModel as error:
        raise BadPlugin(f"reward_model.path: {error}") from error
    states = [(str(path), path.stat()) for path in loaded_files(Path(options.path))]
    files = tuple((path, state.st_size, state.st_mtime_ns) for path, state in states)
    longest = "" if options.max_length is None else f" {options.max_length}"
    return f"{source_version(NAME)} {_digest(options.path, files)[:16]} {options.dtype}{longest}"


@lru_cache(maxsize=4)
def _digest(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the digest of the folder. `files` is the key of the cache: the folder may be large, and the digest is
    needed often."""
    from cairn.engines.models.files import folder_digest

    return folder_digest(Path(folder))


def _text(sample: Sample) -> str:
    """Return the prompt for a model without a chat template: a plain prompt unchanged, or the contents of a chat's
    messages."""
    contents = [str(message.get("content") or "") for message in sample.messages]
    return contents[0] if contents == [sample.prompt] else "".join(f"{one}\n\n" for one in contents)
