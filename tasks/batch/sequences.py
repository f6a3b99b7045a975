"""Conversion between the trajectories of samples and the sequences of a batch.

Outside the training engine a sample is one row, and its tokens are those of its trajectories, one after the other. The
model reads each trajectory by itself, after the prompt; its results per token are then joined again per sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.engines.training.batching import PER_TOKEN
from cairn.engines.types.types import SamplingSupport, TrainBatch
from cairn.storage.ledger.schemas import ROUTED, TRAJECTORY_PROMPTS

# Conversion between the column of routed experts and the arrays that engines exchange.


def routed_column(samples: Sequence[Sequence[np.ndarray | None]]) -> pa.Array:
    """Return the experts of each sample's tokens as a column of type `cairn.storage.ledger.schemas.ROUTED`. A sample is
    null if the experts of one of its trajectories are unknown.

    Args:
        samples: [tokens, layers, top-k] for each trajectory of each sample.
    """
    values: list[dict[str, Any] | None] = []
    for parts in samples:
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            values.append(None)
            continue
        experts = known[0] if len(known) == 1 else np.concatenate(known)
        _, layers, top_k = experts.shape
        little = experts.astype(experts.dtype.newbyteorder("<"), copy=False)
        values.append({"layers": layers, "top_k": top_k, "bytes": experts.itemsize, "experts": little.tobytes()})
    return pa.array(values, ROUTED.type)


def routes_of(value: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return one value of the column as [tokens, layers, top-k]."""
    if value is None:
        return None
    experts = np.frombuffer(value["experts"], np.dtype(f"<u{value['bytes']}"))
    return experts.reshape(-1, value["layers"], value["top_k"])


def routed_experts(samples: pa.Table) -> list[np.ndarray | None] | None:
    """Return [tokens, layers, top-k] for each sample; None if no sample of the batch has routed experts."""
    column = samples.column(ROUTED.name)
    return None if column.null_count == len(column) else [routes_of(value.as_py()) for value in column]


Prompts = Sequence[Sequence[int] | np.ndarray | None]
"""Own prompts of a sample's trajectories; None for a trajectory that follows the sample's prompt."""


def own_prompts(samples: pa.Table) -> list[Prompts | None]:
    """Return the own prompts of each sample's trajectories; None for a sample whose trajectories all follow its
    prompt."""
    prompts: list[Prompts | None] = samples.column(TRAJECTORY_PROMPTS.name).to_pylist()
    return prompts


def last_trajectory(ids: Sequence[int] | np.ndarray, lengths: Sequence[int] | None) -> Sequence[int] | np.ndarray:
    """Return the response tokens of the last trajectory, which is graded and shown as text."""
    return ids if lengths is None else ids[len(ids) - lengths[-1] :]


def split_trajectories(
    batch: TrainBatch, trajectories: Sequence[Sequence[int] | None], own: Sequence[Prompts | None] | None = None
) -> TrainBatch:
    """Turn a batch of samples into a batch of their trajectories, in order.

    Args:
        trajectories: token counts of each sample's trajectories; None for a sample with one.
        own: own prompts of each sample's trajectories; None where all follow the sample's prompt. A trajectory with its
            own prompt has none of the sample's images.
    """
    lengths = [one or [total] for one, total in zip(trajectories, batch.response_lengths, strict=True)]
    spans = [list(pairwise(np.cumsum([0, *one]).tolist())) for one in lengths]
    samples = [sample for sample, own in enumerate(spans) for _ in own]

    def cut(name: str) -> list[Any] | None:
        values = getattr(batch, name)
        if values is None:
            return None
        return [_span(values[sample], *span) for sample, own in enumerate(spans) for span in own]

    prompts = [
        [
            None if prompt is None else np.asarray(prompt, np.int32)
            for prompt in (own and own[sample]) or [None] * len(one)
        ]
        for sample, one in enumerate(spans)
    ]
    input_ids = list[list[np.ndarray]]()
    for ids, total, one, own_ids in zip(batch.input_ids, batch.response_lengths, spans, prompts, strict=True):
        before, response = ids[: len(ids) - total], ids[len(ids) - total :]
        input_ids.append(
            [
                np.concatenate([before if prompt is None else prompt, response[start:end]])
                for (start, end), prompt in zip(one, own_ids, strict=True)
            ]
        )
    routed: list[np.ndarray | None] | None = None
    if batch.routed_experts is not None:
        routed = []
        for sequences, experts in zip(input_ids, batch.routed_experts, strict=True):
            ends = np.cumsum([len(ids) - 1 for ids in sequences])
            routed += [None] * len(sequences) if experts is None else np.split(experts, ends[:-1])
    per_token: dict[str, Any] = {name: cut(name) for name in PER_TOKEN}
    return replace(
        batch,
        input_ids=[ids for sequences in input_ids for ids in sequences],
        response_lengths=[length for one in lengths for length in one],
        groups=None if batch.groups is None else [batch.groups[sample] for sample in samples],
        images=None
        if batch.images is None
        else [
            images if prompt is None else ()
            for images, own_ids in zip(batch.images, prompts, strict=True)
            for prompt in own_ids
        ],
        samples=samples,
        routed_experts=routed,
        **per_token,
    )


def join_by_sample(batch: TrainBatch, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Join an engine's results per sequence into one array per sample."""
    if batch.samples is None:
        return list(values)
    starts = np.flatnonzero(np.diff(batch.samples, prepend=-1))
    return [np.concatenate(values[start:end]) for start, end in pairwise([*starts.tolist(), len(values)])]


def _span(values: np.ndarray | SamplingSupport, start: int, end: int) -> np.ndarray | SamplingSupport:
    return values.at(np.arange(start, end)) if isinstance(values, SamplingSupport) else values[start:end]
