"""Graders of one sample, of several and of groups, plain and asynchronous: what each is given, and what fails whom."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.types.errors import GraderUnavailable
from cairn.engines.types.places import split_place
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.store.canonical import from_json
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.pool import FRESH_PROCESSES, GraderPool
from cairn.tasks.rewards.grader import Graded, Takes
from cairn.tasks.rewards.sample import Sample
from tests.tables import cases
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

GRADERS = """
import asyncio, functools, os, time

under_way = []


async def waiting(sample):
    under_way.append(sample)
    most = len(under_way)
    try:
        if sample.response == "late":
            await asyncio.sleep(600)
        if sample.response == "late once" and os.path.exists(sample.label):
            os.unlink(sample.label)
            await asyncio.sleep(600)
        if sample.response == "late once":
            return 7.0
        if sample.response == "blocks":
            time.sleep(600)
        if sample.response == "raises":
            raise KeyError("no such thing")
        if sample.response == "exits":
            raise SystemExit(3)
        if sample.response == "crashes":
            os._exit(3)
        if sample.response == "much memory":
            return float(len(bytearray(2**30)) > 0)
        await asyncio.sleep(0.05)
        return {"reward": float(sample.response), "under_way": most}
    finally:
        under_way.remove(sample)


def batched(samples):
    responses = [sample.response for sample in samples]
    if "raises" in responses:
        raise KeyError("no such thing")
    if "crashes" in responses:
        os._exit(3)
    if "sleeps" in responses:
        time.sleep(600)
    if "rests" in responses:
        raise ConnectionResetError("by peer")
    if "short" in responses:
        return [1.0]
    told = {"entry": ValueError("this one"), "rests alone": ConnectionResetError("by peer")}
    return [told.get(r) or {"reward": float(r), "of": len(samples)} for r in responses]


async def batched_and_waiting(samples):
    await asyncio.sleep(0)
    return batched(samples)


async def texts_and_waiting(response, label, metadata):
    await asyncio.sleep(0)
    return float(response == label) + len(metadata)


def logged(function):
    @functools.wraps(function)
    def call(*given):
        return function(*given)

    return call


@logged
async def behind_a_decorator(sample):
    await asyncio.sleep(0)
    return 1.0


def in_numpy(sample):
    import numpy as np

    told = {"acc": np.bool_(True), "n": np.int64(3), "each": np.arange(2), "nan": float("nan"), "object": {(1, 2): 3}}
    return {"reward": np.float32(1), **told}


def twice(x):
    return 2 * x


def spawning(sample):
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.map(twice, [1])[0])


def parsed(sample):
    import json

    return {"reward": 1.0, "parsed": json.loads(sample.response)}


def several(sample):
    return {"score": 0.5, "reward": 1.0, "format": 0}
"""


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., GraderPool]]:
    (tmp_path / "graders.py").write_text(GRADERS)
    pools: list[GraderPool] = []

    def make(function: str, retries: int = 0, **options: Any) -> GraderPool:
        config = RewardConfig(custom_rm_path=f"{tmp_path}/graders.py:{function}", **{"rm_timeout": 60, **options})
        pools.append(GraderPool(config, GraderRetries(retries=retries, retry_delay_seconds=0.01)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def grade(pool: GraderPool, *responses: str, label: str | None = None, groups: str | None = None) -> list[Graded]:
    return pool.grade([Sample(response, label) for response in responses], groups)


def rewards(pool: GraderPool, *responses: str, **options: Any) -> list[float | None]:
    return [one.reward for one in grade(pool, *responses, **options)]


def of_each(graded: list[Graded], name: str) -> list[Any]:
    return [(one.components or {}).get(name) for one in graded]


def test_calls_of_a_coroutine_function_run_side_by_side_up_to_the_bound_and_answers_stand_in_order(
    pool_of: Any,
) -> None:
    graded = grade(pool_of("waiting", rm_concurrency=3), *map(str, range(9)))
    assert [one.reward for one in graded] == list(range(9))
    assert max(of_each(graded, "under_way")) == 3
    assert rewards(pool_of("waiting", num_workers=2), *map(str, range(9))) == list(range(9))


def test_a_coroutine_function_may_take_texts(pool_of: Any) -> None:
    samples = [Sample("a", "a"), Sample("b", "a", {"more": 1})]
    assert [one.reward for one in pool_of("texts_and_waiting").grade(samples)] == [1.0, 1.0]


def test_what_a_plain_function_returns_to_be_awaited_is_awaited(pool_of: Any) -> None:
    assert rewards(pool_of("behind_a_decorator"), "a", "b") == [1.0, 1.0]


def test_a_component_that_is_no_json_costs_no_reward(pool_of: Any) -> None:
    components = {"acc": True, "n": 3, "each": [0, 1], "nan": None, "object": "{(1, 2): 3}"}
    assert grade(pool_of("in_numpy"), "") == [Graded(1.0, components)]


def test_a_component_that_is_nested_too_deeply_to_be_read_is_text(pool_of: Any) -> None:
    shallow, deep = ("[" * depth + "]" * depth for depth in (100, 300))
    found = of_each(grade(pool_of("parsed"), shallow, deep), "parsed")
    assert from_json(json.dumps({"parsed": found[0]})) == {"parsed": json.loads(shallow)}
    assert found[1] == deep


def test_a_grader_may_spawn_processes_with_functions_of_its_own_file(pool_of: Any) -> None:
    assert rewards(pool_of("spawning", rm_timeout=60), "") == [2.0]


@pytest.mark.proof
def test_each_call_of_a_coroutine_function_has_its_deadline_and_no_other_pays_for_it(
    pool_of: Any, tmp_path: Path
) -> None:
    pool = pool_of("waiting", rm_timeout=0.2)
    graded = grade(pool, "1", "late", "2", "late", "3")
    assert [one.reward for one in graded] == [1.0, None, 2.0, None, 3.0]
    assert graded[1].error == "the grader took longer than 0.2 s"
    (tmp_path / "once").touch()
    (once,) = pool.grade([Sample("late once", str(tmp_path / "once"))])
    assert (once.reward, (tmp_path / "once").exists()) == (7.0, False)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raises", "KeyError: 'no such thing'"),
        ("exits", "SystemExit: 3"),
        pytest.param("crashes", "died with exit code 3", marks=pytest.mark.proof),
    ],
)
def test_what_one_call_of_a_coroutine_function_ends_in_fails_no_other(pool_of: Any, response: str, error: str) -> None:
    graded = grade(pool_of("waiting", rm_concurrency=3), "1", response, "2", "3", "4")
    assert [one.reward for one in graded] == [1.0, None, 2.0, 3.0, 4.0]
    assert error in (graded[1].error or "")


@pytest.mark.proof
def test_a_coroutine_function_that_does_not_let_the_others_run_fails_alone(pool_of: Any) -> None:
    graded = grade(pool_of("waiting", rm_timeout=0.2), "1", "blocks", "2")
    assert [one.reward for one in graded] == [1.0, None, 2.0]
    assert (graded[1].error, graded[1].tries) == ("the grader took longer than 0.2 s", 1 + FRESH_PROCESSES)


@pytest.mark.proof
def test_memory_that_one_call_wants_is_no_fault_of_those_beside_it(pool_of: Any) -> None:
    graded = grade(pool_of("waiting", rm_memory=2**28), "1", "much memory", "2")
    assert [one.reward for one in graded] == [1.0, None, 2.0]
    assert "MemoryError" in (graded[1].error or "")


@pytest.mark.parametrize("function", ["batched", "batched_and_waiting"])
def test_a_grader_of_samples_is_given_batches(pool_of: Any, function: str) -> None:
    graded = grade(pool_of(function, rm_batch_size=4), *map(str, range(10)))
    assert [one.reward for one in graded] == list(range(10))
    assert of_each(graded, "of") == [4] * 8 + [2] * 2


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raises", "KeyError: 'no such thing'"),
        pytest.param("crashes", "died with exit code 3", marks=pytest.mark.proof),
        pytest.param("sleeps", "the grader took longer than 0.2 s", marks=pytest.mark.proof),
        ("entry", "ValueError: this one"),
    ],
)
def test_none_of_a_batch_is_judged_by_its_company(pool_of: Any, response: str, error: str) -> None:
    pool = pool_of("batched", rm_timeout=0.2 if response == "sleeps" else 60)
    graded = grade(pool, "1", response, "2")
    assert [one.reward for one in graded] == [1.0, None, 2.0]
    assert error in (graded[1].error or "")


def test_a_batch_with_too_few_rewards_says_so(pool_of: Any) -> None:
    graded = grade(pool_of("batched", group_rm=True), "1", "short", groups="aa")
    for one in graded:
        assert "the grader returned 1 rewards for 2 samples: let it return one for each" in (one.error or "")


def test_a_service_that_refuses_one_of_a_batch_fails_that_one(pool_of: Any) -> None:
    pool = pool_of("batched", retries=1)
    with pytest.raises(GraderUnavailable):
        grade(pool, "rests")
    assert rewards(pool, "1", "rests", "2") == [1.0, None, 2.0]
    assert rewards(pool, "1", "rests alone", "2") == [1.0, None, 2.0]


def test_a_grader_of_groups_is_called_once_a_group_and_fails_it_whole(pool_of: Any) -> None:
    pool = pool_of("batched", group_rm=True, rm_batch_size=1)
    graded = grade(pool, "1", "2", "3", "raises", "5", "6", groups="abbcca")
    assert [one.reward for one in graded] == [1.0, 2.0, 3.0, None, None, 6.0]
    assert of_each(graded, "of") == [2, 2, 2, None, None, 2]
    assert "no such thing" in (graded[4].error or "")
    assert rewards(pool, "crashes", "1", "2", groups="aab") == [None, None, 2.0]


def test_what_a_group_asks_again_it_asks_whole(pool_of: Any) -> None:
    graded = grade(pool_of("batched", retries=1, group_rm=True), "1", "rests alone", "3", groups="aab")[:2]
    assert [one.tries for one in graded] == [2, 2]


def test_another_entry_of_a_mapping_may_be_the_reward(pool_of: Any) -> None:
    assert grade(pool_of("several"), "") == [Graded(1.0, {"score": 0.5, "format": 0})]
    assert grade(pool_of("several", reward_key="score"), "") == [Graded(0.5, {"reward": 1.0, "format": 0})]
    (lacking,) = grade(pool_of("several", reward_key="acc"), "")
    assert "lacks 'acc', it has 'format', 'reward', 'score': set reward.reward_key" in (lacking.error or "")


@cases(
    "arguments",
    [
        "data_source, solution, ground_truth, extra_info=None",
        "prompt, response, label",
        "prompts, texts",
        "completions, **kwargs",
    ],
)
def test_arguments_of_another_librarys_signature_are_not_bound_by_their_places(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "foreign.py").write_text(f"def grade({arguments}):\n    return 1.0\n")
    with pytest.raises(BadPlugin, match=r"takes \(.*\): let it take .*\(response, label, metadata\).* by these names"):
        get_grader(RewardConfig(custom_rm_path=f"{tmp_path}/foreign.py:grade"))


@cases("arguments", ["response, _, _metadata", "*args", "response, *others", "response, label, metadata=None"])
def test_arguments_without_names_are_bound_by_their_places(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "own.py").write_text(f"def grade({arguments}):\n    return 1.0\n")
    assert get_grader(RewardConfig(custom_rm_path=f"{tmp_path}/own.py:grade")).takes is Takes.TEXTS


def test_group_rewards_need_a_grader_of_samples(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def grade(sample):\n    return 1.0\n")
    for config in (RewardConfig(custom_rm_path=f"{tmp_path}/one.py:grade", group_rm=True), RewardConfig(group_rm=True)):
        with pytest.raises(BadPlugin, match=r"takes one: let it take \(samples\), or set group_rm to false"):
            get_grader(config)
    assert get_grader(RewardConfig(group_rm=True).of("math")).takes is Takes.SAMPLE


def test_a_run_grades_whole_groups_and_none_of_which_a_sample_failed(tiny_assets: Path, tmp_path: Path) -> None:
    code = """
async def generate(ctx, sample):
    from cairn import Trajectory
    if sample.group_id == 1 and sample.index == 2:
        raise ValueError("no such tool")
    return Trajectory([await ctx.sample(sample.prompt_ids)])


def grade(samples):
    assert len({sample.prompt_ids for sample in samples}) == 1
    ranks = sorted(sample.response for sample in samples)
    return [{"reward": ranks.index(sample.response), "of": len(samples)} for sample in samples]
"""
    (tmp_path / "both.py").write_text(code)
    config = tiny_config(
        tiny_assets,
        reward={"custom_rm_path": f"{tmp_path}/both.py:grade", "group_rm": True},
        rollout={"custom_generate_function_path": f"{tmp_path}/both.py:generate", "num_rollout": 1},
    )
    n = config.rollout.n_samples_per_prompt
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rows = run.read(run.committed(0, Step.REWARD, "00-000")).to_pylist()
    for row in rows:
        if row["group_id"] == 1:
            assert row["reward"] is None
            assert split_place(row["error"])[0] in (
                "generate: ValueError: no such tool",
                "a sample of its group failed: generate: ValueError: no such tool",
            )
        else:
            assert json.loads(row["components"]) == {"of": n}
    assert {row["group_id"] for row in rows} > {1}
