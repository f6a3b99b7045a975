"""Which groups are trained on first, and what the configuration and the data have to say for it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.rollout import RolloutConfig
from cairn.flows.cli.app import exit_code
from cairn.flows.cli.command import FAILED
from cairn.flows.iteration import iteration
from cairn.storage.ledger.schemas import Disposition
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.selecting.buffers import get_policy
from cairn.tasks.selecting.buffers.group import JudgedGroup
from cairn.tasks.selecting.filter import NoSuchMetadata, fill_batch
from cairn.tasks.selecting.sample_filters import NothingLeft, removed_by
from tests.mistakes import mistakes
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

POLICIES = ("youngest_first", "oldest_first", "priority", "stratified")


def group(id: int, age: int = 0, **fields: Any) -> JudgedGroup:
    return JudgedGroup(id, 10 - age, "00-000", 0.5, fields.pop("std", 0.1), None, kept=True, age=age, **fields)


def ordered(policy: str, groups: list[JudgedGroup]) -> list[int]:
    return [one.group_id for one in get_policy(policy)(groups)]


def test_the_oldest_are_first_and_of_one_age_the_first_that_came() -> None:
    assert ordered("oldest_first", [group(0, 1), group(1, 2), group(2, 0), group(3, 2)]) == [1, 3, 0, 2]


def test_the_highest_number_is_first_of_metadata_or_filter_or_spread() -> None:
    assert ordered("priority", [group(0, key=1), group(1, key=2.5, priority=0), group(2, key=2)]) == [1, 2, 0]
    assert ordered("priority", [group(0, priority=-1), group(1, priority=3, std=0.0), group(2, std=0.4)]) == [1, 2, 0]
    with pytest.raises(BadPlugin, match="metadata of group 7 has 'hard' there"):
        ordered("priority", [group(7, key="hard"), group(8, key=1)])


def test_strata_take_turns_and_each_gives_its_youngest() -> None:
    groups = [group(0, 2, key="a"), group(1, 1, key="b"), group(2, 0, key="a"), group(3, 0, key="a"), group(4, key="c")]
    assert ordered("stratified", groups) == [2, 1, 4, 3, 0]


GROUPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3]), st.booleans()), max_size=20).map(
    lambda drawn: [group(id, age, key=key, unfinished=waits) for id, (age, key, waits) in enumerate(drawn)]
)


@pytest.mark.parametrize("policy", POLICIES)
@given(groups=GROUPS)
def test_what_waits_goes_on_in_the_order_in_which_it_came(policy: str, groups: list[JudgedGroup]) -> None:
    found = get_policy(policy)(groups)
    assert [one.group_id for one in found if one.unfinished] == [one.group_id for one in groups if one.unfinished]


@pytest.mark.parametrize("policy", ["oldest_first", "priority"])
@given(
    ranks=st.lists(st.integers(0, 30), unique=True, max_size=12),
    batch_size=st.integers(1, 6),
    max_age=st.integers(0, 30),
    data=st.data(),
)
def test_a_batch_does_not_depend_on_the_order_in_which_its_groups_ended(
    policy: str, ranks: list[int], batch_size: int, max_age: int, data: st.DataObject
) -> None:
    groups = [group(id, age=rank, key=rank) for id, rank in enumerate(ranks)]

    def filled(ended: list[JudgedGroup]) -> tuple[list[int], dict[int, Disposition]]:
        found = fill_batch(ended, batch_size, order=get_policy(policy), use_spare=False, max_age=max_age)
        assert sorted(one.group_id for one in found) == list(range(len(ranks)))
        trained = [one.group_id for one in found if one.disposition is Disposition.TRAIN]
        return trained, {one.group_id: one.disposition for one in found}

    trained, dispositions = filled(groups)
    assert trained == [ranks.index(rank) for rank in sorted(ranks, reverse=True)[:batch_size]]
    assert filled(data.draw(st.permutations(groups))) == (trained, dispositions)


def rollout(**options: Any) -> RolloutConfig:
    return RolloutConfig(num_rollout=3, rollout_batch_size=2, rollout_max_response_len=8, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_filter_path": "priority"}, "so that a batch takes all groups"),
        ({"buffer_filter_path": "stratified", "over_sampling_batch_size": 4}, "stratified, which needs buffer_key"),
        (
            {"buffer_key": "level"},
            r"buffer_key \(level\) has no effect while rollout.buffer_filter_path is youngest_first",
        ),
    ],
)
def test_a_policy_without_effect_is_said(options: dict[str, Any], message: str) -> None:
    assert re.search(message, mistakes(rollout={"rollout_batch_size": 2, **options}))


def test_a_run_takes_the_sources_of_its_data_by_turns(tiny_assets: Path, tmp_path: Path) -> None:
    """Two thirds of the rows are of one source, and half of every batch."""
    rows = [json.loads(line) for line in (tiny_assets / "train.jsonl").read_text().splitlines()]
    data = tmp_path / "train.jsonl"
    for index, row in enumerate(rows):
        row["metadata"] = {"source": "few" if index % 3 == 0 else "many"}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tiny_assets,
        data={"path": str(data), "metadata_key": "metadata", "rollout_shuffle": False},
        rollout={
            "num_rollout": 2,
            "rollout_batch_size": 2,
            "over_sampling_batch_size": 5,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "buffer_filter_path": "stratified",
            "buffer_key": "source",
            "max_age": 1,
        },
    )
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
            rows = run.read(last_selection(run, index)).to_pylist()
            assert sorted(json.loads(row["key"]) for row in rows if row["disposition"] == "train") == ["few", "many"]
        assert max(row["age"] for row in rows) == 1, "what waited competes by its source too"


def test_a_key_that_rows_lack_is_named(tiny_assets: Path, tmp_path: Path) -> None:
    options = {"over_sampling_batch_size": 6, "buffer_filter_path": "priority", "buffer_key": "level"}
    config = tiny_config(tiny_assets, rollout={**BASE, **options})
    with (
        tiny_context(str(tmp_path), config) as (run, _),
        pytest.raises(NoSuchMetadata, match=r"buffer_key is level, but the metadata of data row .* has nothing"),
    ):
        iteration(run, DirectSteps(run), 0)


BASE = {"num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 4}


def test_a_sample_filter_that_leaves_nothing_or_names_what_it_was_not_given_is_named(
    tiny_assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def everything(groups):\n    return sum(groups, [])\n\n\ndef indices(groups):\n    return [0]\n"
    )
    everything, indices = (f"{tmp_path / 'mine.py'}:{name}" for name in ("everything", "indices"))
    config = tiny_config(tiny_assets, rollout={**BASE, "rollout_sample_filter_path": everything})
    with (
        tiny_context(str(tmp_path), config) as (run, _),
        pytest.raises(NothingLeft, match="has removed all 8 samples of the batch"),
    ):
        iteration(run, DirectSteps(run), 0)
    (tmp_path / "half.py").write_text("def half(groups):\n    return sum(groups[:2], [])\n")
    half = {**BASE, "rollout_sample_filter_path": f"{tmp_path / 'half.py'}:half"}
    config = tiny_config(tiny_assets, rollout=half, training={"num_steps_per_rollout": 2})
    with (
        tiny_context(str(tmp_path), config, "half") as (run, _),
        pytest.raises(
            NothingLeft, match=r"optimizer step 1 of 2 of iteration 0 has no token .* fork the run"
        ) as raised,
    ):
        iteration(run, DirectSteps(run), 0)
    assert exit_code(raised.value) == FAILED
    with pytest.raises(BadPlugin, match="something else than samples that it received"):
        removed_by(indices, [[]])
