"""`reward`: grade the samples of one shard, while other shards still generate."""

import json
from collections.abc import Sequence

import pyarrow as pa

from storage.commits import Commit, Step
from storage.schemas import REWARD, Status
from tasks.rewards.pool import Graded, GraderPool, Sample
from tasks.step import Outcome, StepCall, durable


@durable(
    Step.REWARD,
    reads=("reward.rm_type", "reward.custom_rm_path", "reward.rm_timeout"),
    plugins=("reward.custom_rm_path",),
)
def reward(step: StepCall, rollout: Commit) -> Outcome:
    """Grade every sample of the shard. A grader that fails or takes too long marks the sample failed, never zero; what
    failed while it was generated is not graded, and stays failed. A group that is not finished is graded when it is."""
    columns = ["group_id", "sample_index", "response_text", "label", "metadata", "status", "error"]
    samples = step.run.read(rollout, columns).to_pydict()
    grader = step.run.grader
    pairs = list(zip(samples["group_id"], samples["status"], strict=True))
    unfinished = {group_id for group_id, status in pairs if status == Status.ABORTED}
    waits = [group_id in unfinished for group_id in samples["group_id"]]
    generated = zip(samples["response_text"], samples["label"], samples["metadata"], strict=True)
    ready = iter(
        grade_generated(
            grader,
            [
                (response, label, json.loads(metadata) if metadata else {})
                for (response, label, metadata), later in zip(generated, waits, strict=True)
                if not later
            ],
            [error for error, later in zip(samples["error"], waits, strict=True) if not later],
        )
    )
    graded = [Graded(None) if later else next(ready) for later in waits]
    n = len(graded)
    failed = [g.reward is None and not later for g, later in zip(graded, waits, strict=True)]
    table = pa.table(
        {
            "group_id": samples["group_id"],
            "sample_index": samples["sample_index"],
            "reward": [g.reward for g in graded],
            "components": [None if g.components is None else json.dumps(g.components) for g in graded],
            "grader": [grader.name] * n,
            "grader_version": [grader.version] * n,
            "status": [
                str(Status.FAILED) if bad else status for bad, status in zip(failed, samples["status"], strict=True)
            ],
            "error": [g.error for g in graded],
        },
        REWARD,
    )
    return Outcome(
        tables={"rewards.parquet": table},
        metrics={"failed_samples": sum(failed)},
    )


def grade_generated(grader: GraderPool, samples: Sequence[Sample], errors: Sequence[str | None]) -> list[Graded]:
    """Grade the samples whose generation did not fail; the others keep their error. In the order of the samples."""
    graded = iter(grader.grade([sample for sample, error in zip(samples, errors, strict=True) if error is None]))
    return [next(graded) if error is None else Graded(None, error=error) for error in errors]
