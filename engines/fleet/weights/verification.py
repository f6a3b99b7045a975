"""Whether rollout engines have the right weights: by checksum, or by their log-probs of a few tokens."""

import threading
from collections.abc import Collection

import numpy as np

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.handles import Call, EngineHandle
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.types.errors import WeightsDiffer
from cairn.engines.types.types import GenerateRequest, Publication, SamplingParams, TrainBatch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Greatest difference of a token's log-probs that rounding explains. In bfloat16 the change of one update may be
smaller."""

PROMPTS = [[(31 * row + 7 * column) % 97 for column in range(12)] for row in range(4)]
"""Prompts of token ids that every vocabulary has."""
NEW_TOKENS = 12


def verify_checksum(call: Call[str | None], publication: Publication, sent: str) -> None:
    """Compare the checksum that a call returns with that of what was sent. Raises WeightsDiffer."""
    checksum = call.result()
    if checksum not in (None, sent):
        raise WeightsDiffer(
            f"{call.engine.name} received weights with checksum {checksum}, and weight version "
            f"{publication.version} was published with {sent}: it must be published again"
        )


def verify_log_probs(source: TrainingHandle, target: RolloutHandle, config: RunConfig) -> None:
    """Let the target continue fixed prompts and compare its log-probs with the trainer's of the same tokens.

    Weights that no token of the batch uses, such as most rows of an embedding, are not checked.

    Raises:
        WeightsDiffer: the log-probs differ by more than TOLERANCE.
    """
    params = SamplingParams(NEW_TOKENS, config.rollout.rollout_temperature)
    requests = [GenerateRequest((row,), prompt, row, params) for row, prompt in enumerate(PROMPTS)]
    completions = [completion for part in target.generate(requests) for completion in part]
    batch = TrainBatch(
        [np.array([*PROMPTS[done.request_id[0]], *done.response_ids], np.int32) for done in completions],
        [len(done.response_ids) for done in completions],
        [np.ones(len(done.response_ids), np.uint8) for done in completions],
    )
    expected = source.score(batch, "actor")
    worst = max(
        float(np.abs(done.log_probs - scores).max()) for done, scores in zip(completions, expected, strict=True)
    )
    if not worst <= TOLERANCE[config.rollout.dtype]:
        raise WeightsDiffer(
            f"{target.name} holds other weights than the trainer: log-probs of the same tokens differ by {worst:.2g}, "
            f"more than the {TOLERANCE[config.rollout.dtype]:g} that rounding in {config.rollout.dtype} explains"
        )


class LoadedChecksums:
    """Checksums of what engines made of publications, the first of each layout. Threads may share it."""

    def __init__(self) -> None:
        self._first: list[tuple[Publication, RolloutHandle, str]] = []
        self._lock = threading.Lock()

    def compare(self, engine: EngineHandle, publication: Publication, checksum: str) -> None:
        """Compare an engine's checksum with that of an engine of the same layout. If they differ, which of them is
        right is unknown: both are replaced before they serve again. Raises WeightsDiffer."""
        assert isinstance(engine, RolloutHandle)
        with self._lock:
            others = (one for one in self._first if one[0] == publication and one[1].has_layout_of(engine))
            first = next(others, None)
            if first is None:
                self._first.append((publication, engine, checksum))
                return
            _, other, expected = first
            if checksum == expected:
                return
            self._first.remove(first)
        for one in (engine, other):
            one.suspect, one.last_check = True, (0.0, None)
        raise WeightsDiffer(
            f"{engine.name} and {other.name} received the same weights of version {publication.version} and hold "
            f"different ones, by SGLang's checksums {checksum[:12]} and {expected[:12]}"
        )

    def keep(self, versions: Collection[int]) -> None:
        """Drop the checksums of other versions."""
        with self._lock:
            self._first = [one for one in self._first if one[0].version in versions]
