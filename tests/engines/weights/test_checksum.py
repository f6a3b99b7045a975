from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engines.weights.fingerprint import digest, fingerprint, weights_checksum

BLOCK = 1 << 16


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both sums differ: each must notice by itself."""
    return bool((fingerprint(first) != fingerprint(second)).all())


def test_the_fingerprint_is_the_sum_of_bits_times_odd_factors() -> None:
    unit = torch.zeros(3 * BLOCK, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.int64)
    for place, bits in ((0, 3), (7, -2), (BLOCK + 7, 5), (3 * BLOCK - 1, 1)):
        single = torch.zeros_like(unit)
        single[place] = 1
        factors = fingerprint(single)
        assert (factors % 2 == 1).all()
        total += factors * bits
        unit[place] = bits
    assert torch.equal(fingerprint(unit), total)


def test_any_flipped_bit_changes_it() -> None:
    whole = values(1000)
    for bit in range(32):
        altered = whole.clone()
        altered.view(torch.int32)[123] ^= torch.tensor(1 << bit).to(torch.int32)
        assert differ(whole, altered)


def test_swapped_elements_change_it_within_a_block_and_across_blocks() -> None:
    whole = values(3 * BLOCK)
    for first, second in ((0, 1), (5, BLOCK + 5), (BLOCK - 1, BLOCK), (17, 3 * BLOCK - 1)):
        altered = whole.clone()
        altered[first], altered[second] = whole[second], whole[first]
        assert differ(whole, altered)


def test_zero_and_minus_zero_differ() -> None:
    assert differ(torch.zeros(4), -torch.zeros(4))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK), max_size=4))
def test_the_parts_of_a_tensor_add_up_to_the_whole(cuts: list[int]) -> None:
    whole = values(3 * BLOCK)
    bounds = [0, *sorted(cuts), len(whole)]
    parts = [fingerprint(whole[a:b], a) for a, b in pairwise(bounds)]
    assert torch.equal(torch.stack(parts).sum(0), fingerprint(whole))


def test_large_kernels_give_the_same_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(5 * BLOCK + 99)
    expected = fingerprint(whole)
    monkeypatch.setattr("cairn.engines.weights.fingerprint._BLOCKS_AT_A_TIME", {"cpu": 3})
    assert torch.equal(fingerprint(whole), expected)


def test_every_number_format_and_shape_has_a_fingerprint() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool):
        tensor = torch.ones(3, 4, dtype=dtype)
        assert (fingerprint(tensor) != 0).all()
    assert (fingerprint(torch.tensor(1.5)) != 0).all()
    assert (fingerprint(torch.empty(0)) == 0).all()


def test_a_transposed_tensor_is_read_in_its_logical_order() -> None:
    square = values(16).view(4, 4)
    assert torch.equal(fingerprint(square.t()), fingerprint(square.t().contiguous()))
    assert differ(square, square.t())


def test_the_checksum_depends_on_names_shapes_and_values_but_not_on_their_order() -> None:
    a, b = values(12, 1), values(12, 2)
    checksum = weights_checksum([("a", a), ("b", b)])
    assert weights_checksum([("b", b), ("a", a)]) == checksum
    assert weights_checksum([("a", b), ("b", a)]) != checksum
    assert weights_checksum([("a", a.view(3, 4)), ("b", b)]) != checksum
    assert weights_checksum([("a", a)]) != checksum


def test_bfloat16_weights_have_the_checksum_of_the_same_values_in_float32() -> None:
    half = values(1000).bfloat16()
    assert weights_checksum([("a", half)]) == weights_checksum([("a", half.float())])
    assert weights_checksum([("a", half)]) != weights_checksum([("a", values(1000))])


def test_a_checksum_of_parts_at_a_time_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 1001, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = digest([("w", tensor.shape, "float32")], fingerprint(tensor.float())[None])
    for size in (1 << 16, 1 << 22):
        monkeypatch.setattr("cairn.engines.weights.fingerprint._AT_A_TIME", size)
        assert weights_checksum({"w": tensor}.items()) == whole
