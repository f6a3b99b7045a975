"""Metrics of samples: of all that an iteration generated, and of those that it trained on.

With a dynamic filter the two differ: the training samples were selected by reward, so their mean says little about the
policy. The filter step reports the former, the advantage step the latter, under the same names (see
`cairn.flows.reading.metrics`).
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.schemas import Status
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.durable.context import RunContext
from cairn.tasks.grading.shaping import as_graded, sampled_tokens


def sample_metrics(rewards: np.ndarray, lengths: np.ndarray, statuses: Sequence[str]) -> dict[str, float]:
    """Return mean reward, share of truncated responses and lengths of responses; metrics without samples are left out.

    Args:
        rewards: [R] rewards of the graded samples.
        lengths: [N] sampled tokens of every response.
        statuses: [N] final status of every response.
    """
    metrics = {"raw_reward": float(rewards.mean())} if len(rewards) else {}
    if len(lengths):
        metrics |= {
            "truncated_ratio": list(statuses).count(Status.TRUNCATED) / len(lengths),
            "response_len/mean": float(lengths.mean()),
            "response_len/median": float(np.median(lengths)),
            "response_len/max": int(lengths.max()),
            "response_len/min": int(lengths.min()),
        }
    return metrics


def sampled_lengths(samples: pa.Table) -> np.ndarray:
    """Return [N] tokens of each response that the policy sampled, without those of the environment.

    Args:
        samples: `loss_mask` and `segments` of N samples. The mask takes less to read than the tokens.
    """
    lengths: np.ndarray = pc.list_value_length(samples.column("loss_mask")).to_numpy().astype(np.int64)
    segments = samples.column("segments")
    if segments.null_count < len(segments):
        rows = zip(lengths.tolist(), segments.to_pylist(), strict=True)
        lengths = np.array([sampled_tokens(length, own) for length, own in rows])
    return lengths


def generated_metrics(run: RunContext, rollouts: Sequence[Commit], rewards: Sequence[Commit]) -> dict[str, float]:
    """Return metrics of all samples of an iteration's shards whose groups are finished, whatever the filter decided.

    A sample whose generation failed has no response, and one whose grading failed has no reward: neither counts as 0.

    Args:
        rollouts: the rollout commits of the shards.
        rewards: the reward commits of the same shards, in the same order.
    """
    tables = [_finished(run, *pair) for pair in zip(rollouts, rewards, strict=True)]
    if not tables:
        return {}
    samples = pa.concat_tables(tables)
    generated = samples.filter(pc.not_equal(samples.column("status"), str(Status.FAILED)))
    metrics = sample_metrics(
        samples.column("reward").drop_null().to_numpy().astype(np.float64),
        generated.column("length").to_numpy(),
        generated.column("status").to_pylist(),
    )
    return metrics | _by_source(run.data, samples) if isinstance(run.data, MixedData) else metrics


def _by_source(data: MixedData, samples: pa.Table) -> dict[str, float]:
    """Return the mean reward and the number of generated samples of each source of a mixture."""
    sources = np.array([data.source_of(index) for index in samples.column("prompt_index").to_pylist()])
    rewards = samples.column("reward").to_numpy(zero_copy_only=False).astype(np.float64)
    metrics: dict[str, float] = {}
    for name in sorted(set(sources.tolist())):
        graded = rewards[(sources == name) & ~np.isnan(rewards)]
        metrics |= {f"source/{name}/samples": float((sources == name).sum())}
        metrics |= {f"source/{name}/raw_reward": float(graded.mean())} if len(graded) else {}
    return metrics


def _finished(run: RunContext, generated: Commit, graded: Commit) -> pa.Table:
    """Return `prompt_index`, `reward`, and `status` and `length` of the response, of a shard's samples in finished
    groups."""
    samples = run.read(generated, ["group_id", "prompt_index", "status", "loss_mask", "segments"])
    table = pa.table(
        {
            "group_id": samples.column("group_id"),
            "prompt_index": samples.column("prompt_index"),
            "status": samples.column("status"),
            "length": sampled_lengths(samples),
            "reward": as_graded(run.read(graded)),
        }
    )
    parts = table.filter(pc.equal(table.column("status"), str(Status.ABORTED))).column("group_id")
    return table.filter(pc.invert(pc.is_in(table.column("group_id"), parts.combine_chunks())))
