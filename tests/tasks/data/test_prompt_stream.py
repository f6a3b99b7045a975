"""The order of prompts is a function of the seed and the cursor."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.configs.errors import BadData
from cairn.configs.schema.data import RowFormat
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import draw, order


@pytest.fixture(scope="module")
def data(tmp_path_factory, tokenizer) -> PromptData:
    """Seven prompts of 1, 2, ..., 7 tokens."""
    path: Path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * (i + 1), "label": str(i)}) + "\n" for i in range(7)))
    return PromptData.open(RowFormat(apply_chat_template=False), str(path), tokenizer)


def indices(data, cursor, count, *, seed=1, shuffle=True, max_prompt_len=None):
    drawn = draw(data, cursor, count, seed=seed, shuffle=shuffle, max_prompt_len=max_prompt_len)
    return [row.index for row in drawn.rows]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=6), st.sampled_from([None, 7, 4, 1]))
def test_the_stream_does_not_depend_on_how_it_is_cut_into_draws(data, counts, max_prompt_len):
    cursor, rows, passed_over = 0, [], 0
    for count in counts:
        part = draw(data, cursor, count, seed=5, shuffle=True, max_prompt_len=max_prompt_len)
        assert part.cursor - cursor == len(part.rows) + part.passed_over
        cursor, rows, passed_over = part.cursor, rows + part.rows, passed_over + part.passed_over
    whole = draw(data, 0, sum(counts), seed=5, shuffle=True, max_prompt_len=max_prompt_len)
    assert (rows, cursor, passed_over) == (whole.rows, whole.cursor, whole.passed_over)


def test_every_epoch_has_every_row_once_even_within_one_draw(data):
    drawn = draw(data, 0, 7 * 5, seed=3, shuffle=True, max_prompt_len=None)
    assert Counter(row.epoch for row in drawn.rows) == dict.fromkeys(range(5), 7)
    for epoch in range(5):
        assert sorted(row.index for row in drawn.rows if row.epoch == epoch) == list(range(7))
    assert len({tuple(indices(data, 7 * epoch, 7, seed=3)) for epoch in range(5)}) > 1


def test_a_group_id_is_the_position_in_the_stream(data):
    drawn = draw(data, 12, 9, seed=3, shuffle=True, max_prompt_len=5)
    assert drawn.cursor == 12 + 9 + drawn.passed_over
    for row in drawn.rows:
        (redrawn,) = draw(data, row.group_id, 1, seed=3, shuffle=True, max_prompt_len=5).rows
        assert redrawn == row


def test_without_shuffling_rows_come_in_the_order_of_the_file(data):
    assert indices(data, 5, 6, shuffle=False) == [5, 6, 0, 1, 2, 3]


def test_long_prompts_are_passed_over_and_counted(data):
    drawn = draw(data, 0, 8, seed=0, shuffle=False, max_prompt_len=4)
    assert [len(row.prompt_ids) for row in drawn.rows] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert (drawn.cursor, drawn.passed_over) == (11, 3)


def test_data_without_a_short_enough_prompt_is_an_error_and_not_an_endless_loop(data):
    with pytest.raises(BadData, match=r"every prompt is longer than 0 tokens \(the shortest has 1\)"):
        draw(data, 4, 1, seed=0, shuffle=True, max_prompt_len=0)


def philox4x64_10(key: tuple[int, int], n: int) -> list[int]:
    """The first n numbers of the generator as its authors define it (Salmon et al. 2011), counting blocks from 1."""
    mask, numbers = 2**64 - 1, []
    for block in range(1, n // 4 + 2):
        c0, c1, c2, c3 = block, 0, 0, 0
        k0, k1 = key
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        numbers += [c0, c1, c2, c3]
    return numbers[:n]


@pytest.mark.parametrize(("seed", "epoch", "n"), [(7, 2, 10), (2**70, 0, 33)])
def test_the_order_sorts_rows_by_the_numbers_of_philox(seed, epoch, n):
    digest = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=16).digest()
    numbers = philox4x64_10((int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")), n)
    assert order(seed, epoch, n).tolist() == sorted(range(n), key=numbers.__getitem__)


def test_orders_of_seeds_and_epochs_are_unrelated():
    orders = [order(seed, epoch, 1000) for seed in (0, 1, 2**70) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.15
