"""What a batch must hold before a training engine touches its weights."""

from collections.abc import Sequence

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.needs import loss_needs, stands_in
from cairn.engines.types import TrainBatch

PER_TOKEN = (
    "loss_mask",
    "divisor_mask",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "teacher_top_log_probs",
    "teacher_top_ids",
    "values",
    "returns",
    "kept",
)
"""Fields with an entry for each response token."""


def check_batch(batch: TrainBatch) -> None:
    """Make sure that the fields of a batch fit each other.

    Raises:
        ValueError: names the field and the sample.
    """
    if len(batch) == 0:
        raise ValueError("the batch holds no samples")
    for name in ("response_lengths", "loss_mask"):
        if len(getattr(batch, name)) != len(batch):
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries for {len(batch)} samples")
    for name in ("groups", "images"):
        of_samples = getattr(batch, name)
        if of_samples is not None and len(of_samples) != len(batch):
            raise ValueError(f"{name} has {len(of_samples)} entries for {len(batch)} samples")
    if batch.samples is not None:
        if len(batch.samples) != len(batch):
            raise ValueError(f"samples has {len(batch.samples)} entries for {len(batch)} sequences")
        if not set(np.diff(batch.samples, prepend=-1).tolist()) <= {0, 1} or batch.samples[0] != 0:
            raise ValueError("samples does not count the samples from 0, one after the other")
    for sample, (ids, length) in enumerate(zip(batch.input_ids, batch.response_lengths, strict=True)):
        if not 0 <= length < len(ids):
            raise ValueError(
                f"sample {sample} has {len(ids)} tokens, {length} of them in the response: its prompt must not be empty"
            )
    for name in PER_TOKEN:
        field: list[np.ndarray] | None = getattr(batch, name)
        if field is None:
            continue
        for sample, (values, length) in enumerate(zip(field, batch.response_lengths, strict=True)):
            if len(values) != length:
                raise ValueError(f"{name} of sample {sample} has {len(values)} entries for {length} response tokens")
    for sample, experts in enumerate(batch.routed_experts or ()):
        if experts is not None and len(experts) != len(batch.input_ids[sample]) - 1:
            raise ValueError(
                f"routed_experts of sample {sample} has {len(experts)} entries for {len(batch.input_ids[sample])} "
                "tokens: it needs one for each but the last"
            )
    for sample, kept in enumerate(batch.kept or ()):
        ids, length = batch.input_ids[sample], batch.response_lengths[sample]
        place = kept.first_without(ids[len(ids) - length :])
        if place is not None:
            raise ValueError(f"response token {place} of sample {sample} is not among those it was drawn from")


def check_trainable(batch: TrainBatch, steps: Sequence[range], algorithm: AlgorithmConfig) -> None:
    """Make sure that a batch that passed `check_batch` holds what its loss reads, and every optimizer step something to
    train on.

    Raises:
        ValueError: names the field or the step.
    """
    for number, samples in enumerate(steps):
        if not any(batch.loss_mask[sample].any() for sample in samples):
            raise ValueError(
                f"optimizer step {number + 1} of {len(steps)} has no trained token: the loss masks of its samples "
                f"({samples.start} to {samples.stop - 1}) are all zero"
            )
    needs = loss_needs(algorithm)
    for name, why in needs.items():
        if getattr(batch, name) is None and (name != "old_log_probs" or not stands_in(algorithm, num_steps=1)):
            raise ValueError(f"the batch has no {name}, which algorithm.{why} needs")
    if "old_log_probs" in needs and batch.old_log_probs is None and len(steps) > 1:
        raise ValueError(
            f"the batch has no old_log_probs: the current policy can only stand in for the old one in a single "
            f"optimizer step, and {len(steps)} are asked for; score the batch first"
        )
