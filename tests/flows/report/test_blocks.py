"""Columns come out of a block as they went in, texts are cut to what fits, and the right samples are chosen."""

import gzip
import itertools
import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.flows.report.blocks import Block, shortened, text_blocks
from cairn.flows.report.data import Choice, choose


def unpacked(block: Block) -> dict[str, Any]:
    """As `assets/decode.js` reads it."""
    data = gzip.decompress(block.to_bytes())
    (size,) = struct.unpack("<I", data[:4])
    header = json.loads(data[4 : 4 + size])
    assert (4 + size) % 8 == 0, "a typed array cannot begin at any byte"
    columns: dict[str, Any] = {}
    for column in header["columns"]:
        assert column["at"] % 8 == 0
        own = data[4 + size + column["at"] :][: column["bytes"]]
        match column["kind"]:
            case "json":
                columns[column["name"]] = column["value"]
            case "text":
                ends = np.frombuffer(own, "<u4", header["rows"] + 1)
                letters = own[4 * (header["rows"] + 1) :]
                columns[column["name"]] = [letters[a:b].decode() for a, b in itertools.pairwise(ends)]
            case "words":
                codes = np.frombuffer(own, "<i4")
                columns[column["name"]] = [None if code < 0 else column["words"][code] for code in codes]
            case "i16":
                codes = np.frombuffer(own, "<i2")
                columns[column["name"]] = np.where(codes == -32768, np.nan, codes * column["scale"])
            case kind:
                columns[column["name"]] = np.frombuffer(
                    own, {"f32": "<f4", "f64": "<f8", "i32": "<i4", "u8": "u1"}[kind]
                )
    return columns


def test_a_block_holds_what_was_put_into_it() -> None:
    texts = pa.array(["", None, "a\u2028</script>", "\U0001f600 \u202e", "last"]).slice(1)
    block = Block(4)
    block.numbers("numbers", np.array([1.5, np.nan, -2.0, 0.0], np.float32))
    block.numbers("bytes", np.array([1, 2, 3, 4], np.uint8))
    block.text("texts", texts)
    block.words("words", pa.array(["a", None, "b", "a"]))
    block.scaled("scaled", np.array([0.5, np.nan, -8.0, 0.0]))
    block.value("value", {"lone": "\ud800"})
    found = unpacked(block)
    np.testing.assert_array_equal(found["numbers"], np.array([1.5, np.nan, -2.0, 0.0], np.float32))
    assert found["bytes"].tolist() == [1, 2, 3, 4]
    assert found["texts"] == ["", "a\u2028</script>", "\U0001f600 \u202e", "last"]
    assert found["words"] == ["a", None, "b", "a"]
    np.testing.assert_allclose(found["scaled"], [0.5, np.nan, -8.0, 0.0], atol=8 / 32767)
    assert found["value"] == {"lone": "\ud800"}


def test_texts_in_blocks_are_all_there_in_their_order() -> None:
    texts = [f"{'x' * (number % 7)}{number}" for number in range(100)] + ["y" * 500]
    found, firsts = [], []
    for block in text_blocks("text", pa.chunked_array([texts[:40], texts[40:]]), 64):
        columns = unpacked(block)
        assert sum(map(len, columns["text"])) <= 64 or len(columns["text"]) == 1
        firsts.append(columns["first"])
        found += columns["text"]
    assert found == texts
    assert firsts == sorted(set(firsts))


def test_texts_are_cut_only_where_they_must_be_and_then_as_little_as_possible() -> None:
    texts = pa.chunked_array([["a" * 10, "b" * 100, None, "c" * 1000]])
    assert shortened(texts, 1110) == (texts, None)
    cut, length = shortened(texts, 210)
    assert length == 100
    assert [len(text or "") for text in cut.to_pylist()] == [10, 100, 0, 100]


def test_few_samples_are_all_chosen() -> None:
    assert choose(np.zeros(3, np.int32), np.array([0.0, np.nan, 1.0]), 3, seed=0).tolist() == [Choice.ALL] * 3


def test_the_chosen_samples_are_the_best_the_worst_the_median_and_of_every_iteration() -> None:
    iterations = np.repeat(np.arange(20), 100)
    rewards = np.random.default_rng(1).permutation(2000).astype(np.float32)
    why = choose(iterations, rewards, 200, seed=7)
    assert int((why != Choice.NONE).sum()) == 200
    assert sorted(rewards[why == Choice.BEST]) == list(range(1980, 2000))
    assert sorted(rewards[why == Choice.WORST]) == list(range(20))
    assert np.abs(rewards[why == Choice.MEDIAN] - 1000).max() <= 11
    spread = np.bincount(iterations[why == Choice.SPREAD], minlength=20)
    assert spread.max() - spread.min() <= 1
    assert (choose(iterations, rewards, 200, seed=7) == why).all()
    assert (choose(iterations, rewards, 200, seed=8) != why).any()


def test_failed_samples_are_among_the_worst() -> None:
    rewards = np.linspace(0, 1, 1000, dtype=np.float32)
    rewards[[3, 500, 900]] = np.nan
    why = choose(np.zeros(1000, np.int32), rewards, 100, seed=0)
    assert why[[3, 500, 900]].tolist() == [Choice.WORST] * 3
