"""Values that travel between processes."""

import pickle
from dataclasses import fields, replace

import numpy as np

from cairn.engines.types.types import TrainBatch


def test_a_batch_travels_as_few_arrays_and_arrives_as_it_was() -> None:
    rng = np.random.default_rng(0)
    lengths = [5, 0, 12, *rng.integers(1, 20, 253).tolist()]
    log_probs = [rng.standard_normal(length).astype(np.float32) for length in lengths]
    batch = TrainBatch(
        input_ids=[rng.integers(0, 99, length + 3).astype(np.int32) for length in lengths],
        response_lengths=lengths,
        loss_mask=[rng.integers(0, 2, length).astype(np.uint8) for length in lengths],
        old_log_probs=log_probs,
        rollout_log_probs=log_probs,
        teacher_top_ids=[rng.integers(0, 99, (length, 3)).astype(np.int32) for length in lengths],
        groups=[index // 8 for index in range(len(lengths))],
        routed_experts=[None, *(np.ones((2, 1, 2), np.uint8) for _ in lengths[1:])],
    )
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(replace(batch, routed_experts=None), 5, buffer_callback=buffers.append)
    assert len(buffers) == 4, "of what is trained on, its mask, log-probs and a teacher's tokens"
    result = pickle.loads(pickle.dumps(batch))
    assert result.old_log_probs is result.rollout_log_probs
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(result, field.name)
        if isinstance(before, list):
            for one, other in zip(before, after, strict=True):
                assert type(one) is type(other)
                assert np.array_equal(one, other)
                assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        else:
            assert before is after is None
