"""Whether a rollout engine holds the weights that it should: by checksum, or by what it makes of a few tokens."""

from typing import Any

import numpy as np

from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import WeightsDiffer
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.types import GenerateRequest, SamplingParams, TrainBatch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Greatest difference of a token's log-probs that rounding explains. In bfloat16 one update's change may be smaller."""

PROMPTS = [[(31 * row + 7 * column) % 97 for column in range(12)] for row in range(4)]
"""Token ids that every vocabulary has."""
NEW_TOKENS = 12


def verify_checksum(target: RolloutHandle, asked: Any, version: int, digest: str) -> None:
    """Compare the checksum that the target was asked for (`submit`) with that of the version. Raises WeightsDiffer."""
    found = target.finish(asked, "weights_checksum")
    if found != digest:
        raise WeightsDiffer(
            f"{target.name} holds weights with checksum {found}, and weight version {version} was published with "
            f"{digest}: it must be published again"
        )


def verify_log_probs(source: TrainingHandle, target: RolloutHandle, config: RunConfig) -> None:
    """Let the target continue fixed prompts and compare its log-probs with the trainer's of the same tokens.

    Weights that no token of the batch meets, such as most rows of an embedding, go unseen.

    Raises:
        WeightsDiffer: they differ by more than TOLERANCE.
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
            f"{target.name} holds other weights than the trainer: log-probs of the same tokens differ by "
            f"{worst:.2g}, {TOLERANCE[config.rollout.dtype]:g} is what rounding explains in {config.rollout.dtype}"
        )
