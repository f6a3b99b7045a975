import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.engines.training.batching import pack_micro_batches, plan_micro_batches, split_steps

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(lambda lengths: dict(enumerate(lengths)))


@given(LENGTHS, st.none() | st.integers(1, 2000), st.integers(1, 5))
def test_every_sample_counts_exactly_once_and_ranks_run_equally_many_micro_batches(
    lengths: dict[int, int], max_tokens: int | None, world_size: int
) -> None:
    plan = plan_micro_batches(lengths, max_tokens, world_size)
    counted = [i for rank in plan for micro_batch in rank if micro_batch.counted for i in micro_batch.samples]
    assert sorted(counted) == sorted(lengths)
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 5))
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_sample(
    lengths: dict[int, int], max_tokens: int, world_size: int
) -> None:
    for rank in plan_micro_batches(lengths, max_tokens, world_size):
        for micro_batch in rank:
            padded = len(micro_batch.samples) * max(lengths[i] for i in micro_batch.samples)
            assert padded <= max_tokens or len(micro_batch.samples) == 1


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 5), st.randoms())
def test_the_plan_does_not_depend_on_the_order_in_which_lengths_come(
    lengths: dict[int, int], max_tokens: int, world_size: int, random: object
) -> None:
    shuffled = list(lengths.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_micro_batches(dict(shuffled), max_tokens, world_size) == plan_micro_batches(
        lengths, max_tokens, world_size
    )


def test_neighbours_in_length_share_a_micro_batch() -> None:
    (plan,) = plan_micro_batches({0: 10, 1: 90, 2: 12, 3: 100}, 200)
    assert [micro_batch.samples for micro_batch in plan] == [(3, 1), (2, 0)]


def test_without_a_budget_each_rank_has_one_micro_batch_of_alike_lengths() -> None:
    plan = plan_micro_batches({0: 10, 1: 90, 2: 12, 3: 100}, None, 2)
    assert [[micro_batch.samples for micro_batch in rank] for rank in plan] == [[(3, 2)], [(1, 0)]]


def test_a_rank_left_without_a_sample_repeats_one_that_does_not_count() -> None:
    first, second = plan_micro_batches({7: 10}, 100, 2)
    assert first[0].counted
    assert not second[0].counted


@given(LENGTHS, st.none() | st.integers(1, 2000), st.integers(1, 5), st.integers(1, 4))
def test_packed_samples_count_exactly_once_within_the_budget_and_ranks_run_equally_many_micro_batches(
    lengths: dict[int, int], max_tokens: int | None, ranks: int, multiple: int
) -> None:
    plan = pack_micro_batches(lengths, max_tokens, ranks, multiple)
    counted = [micro_batch.samples for rank in plan for micro_batch in rank if micro_batch.counted]
    assert sorted(i for samples in counted for i in samples) == sorted(lengths)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple == 0
    if max_tokens is None:
        assert len(plan[0]) == multiple
    else:
        assert all(len(samples) == 1 or sum(lengths[i] for i in samples) <= max_tokens for samples in counted)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 5), st.integers(1, 4))
def test_micro_batches_of_so_many_samples_hold_no_more_and_every_sample_once(
    lengths: dict[int, int], most: int, ranks: int, multiple: int
) -> None:
    for plan in (
        plan_micro_batches(lengths, None, ranks, most_samples=most),
        pack_micro_batches(lengths, None, ranks, multiple, most_samples=most),
    ):
        counted = [micro_batch.samples for rank in plan for micro_batch in rank if micro_batch.counted]
        assert sorted(i for samples in counted for i in samples) == sorted(lengths)
        assert max(map(len, counted)) <= most
        assert len({len(rank) for rank in plan}) == 1


def test_packed_micro_batches_are_full_and_ranks_have_alike_many_tokens_and_squares() -> None:
    lengths = {i: 20 + i * i % 199 for i in range(200)}
    plan = pack_micro_batches(lengths, 1000, 4)
    fill = [sum(lengths[i] for i in micro_batch.samples) for rank in plan for micro_batch in rank]
    assert sum(fill) / len(fill) > 900
    for power in (1, 2):
        work = [sum(lengths[i] ** power for micro_batch in rank for i in micro_batch.samples) for rank in plan]
        assert max(work) < 1.03 * sum(work) / len(work)


def test_steps_are_equal_contiguous_parts() -> None:
    assert split_steps(range(6), 3) == [range(2), range(2, 4), range(4, 6)]


def test_steps_have_equally_many_samples_and_all_sequences_of_each() -> None:
    assert split_steps([0, 0, 0, 1, 2, 3, 3], 2) == [range(4), range(4, 7)]


@pytest.mark.parametrize("num_steps", [0, 4, 7])
def test_samples_that_do_not_divide_into_the_steps_are_refused(num_steps: int) -> None:
    with pytest.raises(ValueError, match=f"6 samples cannot be cut into {num_steps}"):
        split_steps(range(6), num_steps)
