"""`reward`: grade the samples of one shard, while other shards still generate."""

import json

import pyarrow as pa

from storage.commits import Commit, Step
from storage.schemas import REWARD, Status
from tasks.step import Outcome, StepCall, durable


@durable(
    Step.REWARD,
    reads=("reward.rm_type", "reward.custom_rm_path", "reward.rm_timeout"),
    plugins=("reward.custom_rm_path",),
)
def reward(step: StepCall, rollout: Commit) -> Outcome:
    """Grade every sample of the shard. A grader that fails or takes too long marks the sample failed, never zero."""
    columns = ["group_id", "sample_index", "response_text", "label", "metadata", "status", "error"]
    samples = step.run.read(rollout, columns).to_pydict()
    grader = step.run.grader
    graded = grader.grade(
        [
            (response, label, json.loads(metadata) if metadata else {})
            for response, label, metadata in zip(
                samples["response_text"], samples["label"], samples["metadata"], strict=True
            )
        ]
    )
    n = len(graded)
    failed = [g.reward is None for g in graded]
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
