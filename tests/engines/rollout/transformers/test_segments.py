"""Rows of a decoding step attend to what they need, and to little more."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.engines.rollout.transformers.decoding import WORTH, RowOrder, positions_read, segments_of, whole

rows_of = st.lists(st.integers(0, 4000), min_size=1, max_size=300).map(np.array)


@given(rows_of)
def test_each_row_has_its_positions(positions: np.ndarray) -> None:
    segments = segments_of(positions)
    ends, lengths = segments[:, 0], segments[:, 1]
    assert (np.diff(ends, prepend=0) > 0).all()
    assert ends[-1] == len(positions)
    assert (np.diff(lengths) < 0).all()
    assert (np.repeat(lengths, np.diff(ends, prepend=0)) > positions).all()
    assert positions_read(segments) <= positions_read(whole(len(positions), lengths[0]))


@given(rows_of)
def test_rows_in_order_read_at_most_twice_what_they_need_but_for_what_is_not_worth_a_kernel(
    positions: np.ndarray,
) -> None:
    segments = segments_of(np.sort(positions)[::-1])
    padded = positions + 16
    assert positions_read(segments) <= 2 * padded.sum() + 2 * WORTH


def test_rows_are_put_in_order_when_as_much_was_read_for_nothing_as_they_hold() -> None:
    order = RowOrder()
    positions = np.full(64, 30)
    positions[-1] = 600
    better = next(result for _ in range(10) if (result := order.better(positions)) is not None)
    assert better[0] == 63
    assert sorted(better.tolist()) == list(range(64))
    in_order = positions[better]
    assert all(order.better(in_order + step) is None for step in range(50))


def test_no_segment_is_made_that_reads_no_less() -> None:
    assert segments_of(np.array([15, *[0] * 600])).tolist() == [[601, 16]]


def test_few_short_rows_are_left_as_they_are() -> None:
    order = RowOrder()
    assert all(order.better(np.array([1, 2, 300])) is None for _ in range(1000))
