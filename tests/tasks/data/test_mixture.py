"""A mixture draws by weight, each source in its own epochs, and is a function of its cursor."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.errors import BadData
from cairn.configs.schema.data import MixedSource
from cairn.tasks.data.drawing import MixedData, draw_mixed
from cairn.tasks.data.prompts import PromptRow

SIZES = {"ten": 10, "three": 3, "twenty": 20}


def mixed(folder, tokenizer, weights: dict[str, float]) -> MixedData:
    """Prompts of 1, 2, … tokens, each source with a letter of its own."""
    sources = []
    for name, weight in weights.items():
        path = folder / f"{name}.jsonl"
        rows = [{"prompt": name[0] * (i + 1), "label": f"{name}-{i}"} for i in range(SIZES[name])]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(MixedSource(name=name, path=str(path), weight=weight, apply_chat_template=False))
    return MixedData.open(sources, tokenizer)


@pytest.fixture(scope="module")
def opened(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("mixture")
    return lambda weights: mixed(folder, tokenizer, weights)


def drawn(data, cursor, count, **options):
    return draw_mixed(data, cursor, count, **{"seed": 1, "shuffle": True, "max_prompt_len": None, **options})


def undrawn(row: PromptRow) -> PromptRow:
    return replace(row, group_id=0, epoch=0)


def names(rows):
    return [row.metadata["source"] for row in rows]


weights = st.lists(st.floats(0.01, 100), min_size=3, max_size=3).map(lambda found: dict(zip(SIZES, found, strict=True)))


@settings(max_examples=40, deadline=None)
@given(weights, st.lists(st.integers(0, 25), max_size=5), st.sampled_from([None, 3, 7]))
def test_any_cut_into_rounds_gives_the_same_sequence(opened, weights, counts, longest):
    data = opened(weights)
    cursor, rows, passed_over = 0, [], 0
    for count in counts:
        part = drawn(data, json.loads(json.dumps(cursor)), count, max_prompt_len=longest)
        cursor, rows, passed_over = part.cursor, rows + part.rows, passed_over + part.passed_over
    whole = drawn(data, 0, sum(counts), max_prompt_len=longest)
    assert (rows, passed_over) == (whole.rows, whole.passed_over)
    assert sum(counts) == 0 or cursor == whole.cursor


@settings(max_examples=40, deadline=None)
@given(weights)
def test_every_stretch_has_the_proportions_of_the_weights(opened, weights):
    sequence = names(drawn(opened(weights), 0, 200, max_prompt_len=5).rows)
    total = sum(weights.values())
    for begin, end in ((0, 10), (0, 200), (37, 52), (100, 200)):
        counts = Counter(sequence[begin:end])
        for name, weight in weights.items():
            assert abs(counts[name] - (end - begin) * weight / total) < len(weights)


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(0, 5))
def test_no_row_comes_twice_in_an_epoch_of_its_source(opened, weights, seed):
    rows = drawn(opened(weights), 0, 150, seed=seed).rows
    assert max(Counter((row.index, row.epoch) for row in rows).values()) == 1
    for name, size in SIZES.items():
        epochs = [row.epoch for row in rows if row.metadata["source"] == name]
        assert all(after - before in (0, 1) for before, after in pairwise(epochs))
        assert all(count == size for epoch, count in Counter(epochs).items() if epoch < max(epochs))


def test_rows_know_where_they_are_from_and_are_numbered_through(opened):
    data = opened({"ten": 1, "three": 1})
    assert len(data) == 13
    for row in drawn(data, 0, 40).rows:
        source, index = row.label.split("-")
        assert row.metadata == {"source": source}
        assert row.index == int(index) + (10 if source == "three" else 0)
        assert data.row(row.index) == undrawn(row)
        assert data.source_of(row.index) == source


def test_group_ids_are_unique_and_go_on(opened):
    data = opened({"ten": 1, "three": 3})
    first = drawn(data, 0, 7, max_prompt_len=2)
    second = drawn(data, first.cursor, 5)
    assert [row.group_id for row in first.rows + second.rows] == list(range(12))


def test_what_is_in_quarantine_is_passed_over_in_its_own_source(opened):
    data = opened({"ten": 1, "three": 1})
    rows = drawn(data, 0, 60, without={0, 11}).rows
    assert {row.index for row in rows} == set(range(13)) - {0, 11}
    assert Counter(names(rows)) == {"ten": 30, "three": 30}


def test_other_weights_hold_from_where_they_are_set(opened):
    """A fork changes them: it does not first make up for what was drawn before."""
    before = drawn(opened({"ten": 1, "three": 1}), 0, 100)
    after = drawn(opened({"ten": 9, "three": 1}), before.cursor, 20)
    assert abs(Counter(names(after.rows))["three"] - 2) <= 1
    added = drawn(opened({"ten": 1, "three": 1, "twenty": 1}), before.cursor, 30)
    assert Counter(names(added.rows)) == {"ten": 10, "three": 10, "twenty": 10}


def test_a_source_of_which_no_prompt_will_do_is_named(opened):
    data = opened({"ten": 1, "three": 1})
    with pytest.raises(BadData, match=r"every prompt of .*three\.jsonl is in quarantine"):
        drawn(data, 0, 2, without={10, 11, 12})


def test_the_fingerprint_is_of_every_source(opened):
    data = opened({"ten": 1, "three": 1})
    assert data.fingerprints.keys() == {"ten", "three"}
    assert data.fingerprint == opened({"ten": 5, "three": 1}).fingerprint != opened({"ten": 1}).fingerprint


def test_a_fork_without_its_parent_s_curriculum_goes_on_where_the_sources_stand(opened):
    data = opened({"ten": 1.0, "twenty": 1.0})
    first = drawn(data, 0, 6)
    went_on = drawn(data, first.cursor, 6)
    fork = drawn(data, {"drawn": 8, "data": first.cursor, "curriculum": [1]}, 6)
    assert [undrawn(row) for row in fork.rows] == [undrawn(row) for row in went_on.rows]
    assert [row.group_id for row in fork.rows] == list(range(8, 14))
