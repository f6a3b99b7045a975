"""Differences between versions of weights are lossless whatever the bits are, and broken ones are errors."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from cairn.engines.weights import differences
from cairn.engines.weights.differences import FORMAT, _compressed, decode, encode
from cairn.engines.weights.fingerprint import bits_of

FORMATS = {
    torch.uint8: 8,
    torch.float8_e4m3fn: 8,
    torch.float8_e5m2: 8,
    torch.bfloat16: 16,
    torch.float16: 16,
    torch.float32: 32,
    torch.float64: 64,
    torch.int64: 64,
}
"""Number formats and their bits."""

Pair = tuple[str, torch.Tensor, torch.Tensor]


def tensor_of(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values.copy()).view(dtype)


@st.composite
def pairs(draw: st.DrawFn) -> list[Pair]:
    """Tensors of random bits, of which few or all change to other random bits."""
    found = []
    for index in range(draw(st.integers(0, 4))):
        dtype, bits = draw(st.sampled_from(sorted(FORMATS.items(), key=str)))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        old = generator.integers(
            0, 2**bits, draw(st.sampled_from([0, 1, 3, 254, 255, 256, 511, 3000])), f"u{bits // 8}"
        )
        changed = generator.random(len(old)) < draw(st.sampled_from([0.0, 0.002, 0.02, 0.5, 1.0]))
        new = np.where(changed, generator.integers(0, 2**bits, len(old), f"u{bits // 8}"), old)
        found.append((f"layer.{index}", tensor_of(old, dtype), tensor_of(new, dtype)))
    return found


def applied(difference: bytes, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in old.items()}
    for change in decode(difference, tensors):
        change.apply_to(tensors[change.name])
    return tensors


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits_of(first), bits_of(second))


@given(pairs(), st.sampled_from([1, 7, 256, differences._BLOCK]))
@settings(max_examples=150, deadline=None)
def test_any_bits_become_any_others(given: list[Pair], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "_BLOCK", block)
        result = applied(encode(given), {name: old for name, old, _ in given})
    assert all(equal(result[name], new) for name, _, new in given)


def test_special_numbers_and_shapes_are_kept() -> None:
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1.0]
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e5m2):
        old = torch.tensor(odd).to(dtype)
        for shift in range(len(odd)):
            new = old.roll(shift)
            assert equal(applied(encode([("w", old, new)]), {"w": old})["w"], new)
    matrix, scalar = torch.randn(5, 7), torch.tensor(3.5)
    result = applied(encode([("m", matrix, matrix + 1), ("s", scalar, -scalar)]), {"m": matrix, "s": scalar})
    assert equal(result["m"], matrix + 1)
    assert equal(result["s"], -scalar)


def test_unchanged_tensors_take_no_room() -> None:
    old = {f"frozen.{index}": torch.randn(1000) for index in range(50)}
    assert len(encode((name, tensor, tensor.clone()) for name, tensor in old.items())) < 200
    some = encode([*((name, tensor, tensor) for name, tensor in old.items()), ("w", torch.zeros(1), torch.ones(1))])
    assert [change.name for change in decode(some, {"w": torch.zeros(1)})] == ["w"]


def test_a_long_way_between_two_changes() -> None:
    for length in (255, 256, 510, 511, 100_000):
        old = torch.zeros(length, dtype=torch.bfloat16)
        new = old.clone()
        new[0] = new[-1] = 1
        assert equal(applied(encode([("w", old, new)]), {"w": old})["w"], new)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_broken_bytes_are_a_value_error_or_decode(data: st.DataObject) -> None:
    old = torch.arange(2000, dtype=torch.float32)
    tensors = {"a": old, "b": old.bfloat16()}
    whole = bytearray(encode([("a", old, old * 1.5), ("b", tensors["b"], tensors["b"] + 3)]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole) // 2, 9, 0]))])
    try:
        for change in decode(broken, tensors):
            assert len(change.positions) == len(change.steps)
            assert not len(change.positions) or 0 <= int(change.positions[0]) <= int(change.positions[-1]) < len(old)
    except ValueError:
        pass


CLAIMED = 2_000_000


@pytest.mark.parametrize(
    ("claims", "error"),
    [
        (
            [("w", "bfloat16", [CLAIMED])],
            r"w is torch.bfloat16 \(8,\), and .* was made from .* \(2000000,\)",
        ),
        ([("w", "int16", [8])], "w is torch.bfloat16 .* was made from torch.int16"),
        ([("w", "bfloat16", [8])] * (CLAIMED // 8), "changes a tensor twice"),
        ([("v", "bfloat16", [CLAIMED])], "changes v, which the version before it does not have"),
        ([("w", "bfloat16", [8])], "2000000 changes of 8 elements"),
    ],
)
def test_a_difference_changes_no_more_than_there_is(claims: list[tuple[str, str, list[int]]], error: str) -> None:
    """Its few bytes would otherwise become as many as it claims."""
    parts = {f"2.{name}": _compressed(np.zeros(size * CLAIMED, np.uint8)) for name, size in (("gaps", 1), ("steps", 2))}
    header = {"tensors": claims, "counts": {"2": (CLAIMED, CLAIMED)}}
    forged = save(parts, metadata={"cairn.difference": FORMAT, "header": json.dumps(header)})
    with pytest.raises(ValueError, match=error):
        next(decode(forged, {"w": torch.zeros(8, dtype=torch.bfloat16)}))


@pytest.mark.parametrize("block", [1, 3, differences._BLOCK])
@pytest.mark.parametrize(
    ("gaps", "error"),
    [
        ([0, 0, 300], "lead beyond 3 changes of 302 elements"),
        ([0, 0, 0, 0], "lead beyond 3 changes of 302 elements"),
        ([0, 255, 0], "lead to 2 changes, and it has 3"),
        ([0, 0, 0, 255], "lead to 3 changes, and it has 3"),
    ],
)
def test_gaps_lead_to_as_many_changes_of_its_tensors(
    gaps: list[int], error: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "_BLOCK", block)
    stored = np.array([byte for gap in gaps for byte in ([255, gap - 255] if gap > 255 else [gap])], np.uint8)
    parts = {"1.gaps": _compressed(stored), "1.steps": _compressed(np.full(3, 2, np.uint8))}
    header = {"tensors": [("v", "uint8", [2]), ("w", "uint8", [300])], "counts": {"1": (3, len(stored))}}
    forged = save(parts, metadata={"cairn.difference": FORMAT, "header": json.dumps(header)})
    with pytest.raises(ValueError, match=error):
        list(decode(forged, {"v": torch.zeros(2, dtype=torch.uint8), "w": torch.zeros(300, dtype=torch.uint8)}))


def test_other_bytes_are_no_difference() -> None:
    with pytest.raises(ValueError, match="not a difference"):
        list(decode(b"x" * 100, {}))
