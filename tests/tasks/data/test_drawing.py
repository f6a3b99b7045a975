"""Runs that draw from mixtures, by curricula, from sources with a state: what is drawn follows from commits alone."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cairn.configs.errors import BadData
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import find_metric, shown_metrics
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.store.errors import RunDiffers
from cairn.tasks.data.drawing import next_prompts
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import GroupResult, StatefulPrompts
from cairn.tasks.durable.context import RunContext, round_results, unreported_results
from cairn.tasks.durable.selection import last_selection
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

SOURCE = '''
"""Asks for as many digits as were sorted well: harder where the policy does well, easier where it does not."""


def get_samples(path, state, count, results):
    state = state or {"level": 3, "asked": 0}
    rewards = [group.mean_reward for group in results if group.mean_reward is not None]
    if rewards:
        assert all(group.metadata["level"] == state["level"] for group in results)
        state["level"] += 1 if sum(rewards) / len(rewards) > 0.3 else -1
    rows = []
    for _ in range(count):
        state["asked"] += 1
        digits = " ".join(str(state["asked"] * k % 10) for k in range(1, max(2, state["level"]) + 1))
        metadata = {"level": state["level"]}
        rows.append({"prompt": f"{path} {digits}.", "label": "", "metadata": metadata})
    return rows, state
'''


def config_of(assets: Path, folder: Path, kind: str, **rollout: Any) -> RunConfig:
    """Three iterations that draw prompts in one of the ways."""
    (folder / "source.py").write_text(SOURCE)
    rows = (assets / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "easy.jsonl").write_text("".join(rows[:5]))
    (folder / "hard.jsonl").write_text("".join(rows[5:]))
    easy, hard = ({"name": name, "path": str(folder / f"{name}.jsonl")} for name in ("easy", "hard"))
    data = {
        "mixture": {"path": "", "mixture": [easy, {**hard, "weight": 3}]},
        "curriculum": {"curriculum": {"policy": "pass_rate", "low": 0.05, "high": 0.3}},
        "both": {"path": "", "mixture": [easy, hard], "curriculum": {"policy": "pass_rate", "low": 0.0, "high": 1.0}},
        "source": {"path": "Sort the digits", "get_samples_path": f"{folder / 'source.py'}:get_samples"},
    }[kind]
    plain = tiny_config(assets)
    return tiny_config(
        assets,
        data={"path": plain.data.path} | data,
        rollout={**plain.rollout.model_dump(), "rollout_max_response_len": 6, **rollout},
    )


class DyingSteps(DirectSteps):
    """Ends its driver before a step of iteration 1."""

    def __init__(self, run: RunContext, before: tuple[str, str | None] | None) -> None:
        super().__init__(run)
        self._before = before

    def call(self, step: Any, index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if index == 1 and (str(step.name), shard) == self._before:
            raise Killed
        return super().call(step, index, shard, *args, **kwargs)


class Killed(Exception):
    pass


def trained(store: Path, config: RunConfig, killed_before: tuple[str, str | None] | None = None) -> list[Any]:
    """Of a run that may be killed once: what each of its groups was asked, cursors, and the final weights."""
    if killed_before is not None:
        with tiny_context(str(store), config) as (run, _):
            iteration(run, DirectSteps(run), 0)
            with pytest.raises(Killed):
                iteration(run, DyingSteps(run, killed_before), 1)
    with tiny_context(str(store), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        prompts = [
            (row["group_id"], row["prompt_index"], row["prompt_text"], row["metadata"])
            for index in range(3)
            for row in rollout_rows(run, index)
        ]
        cursors = [last_selection(run, index).values["cursor"] for index in range(3)]
        return [prompts, cursors, run.committed(2, Step.TRAIN).state_digest]


def rollout_rows(run: RunContext, index: int) -> list[dict[str, Any]]:
    """The first sample of each group of an iteration."""
    commits = [commit for commit in run.ledger.commits(index) if commit.step is Step.ROLLOUT]
    rows = [row for commit in commits for row in run.read(commit).to_pylist()]
    return [row for row in rows if row["sample_index"] == 0]


@pytest.mark.parametrize(
    ("kind", "killed_before"),
    [
        ("both", ("rollout", "00-001")),
        pytest.param("mixture", ("rollout", "00-001"), marks=pytest.mark.slow),
        pytest.param("curriculum", ("filter", "00"), marks=pytest.mark.slow),
        pytest.param("source", ("rollout", "00-001"), marks=pytest.mark.slow),
        pytest.param("source", ("train", None), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_draws_what_it_would_have_drawn(
    tiny_assets: Path, tmp_path: Path, kind: str, killed_before: tuple[str, str | None]
) -> None:
    config = config_of(tiny_assets, tmp_path, kind, shards_per_round=2)
    undisturbed = trained(tmp_path / "one", config)
    assert trained(tmp_path / "two", config, killed_before) == undisturbed
    groups = [group for group, *_ in undisturbed[0]]
    assert len(groups) == len(set(groups)) == 12


@pytest.mark.slow
def test_a_mixture_of_a_local_file_and_one_at_s3_draws_as_of_local_files(
    tiny_assets: Path, tmp_path: Path, s3_url: str
) -> None:
    config = config_of(tiny_assets, tmp_path, "mixture", shards_per_round=2)
    local = trained(tmp_path / "local", config)
    url = f"{s3_url}/hard.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / "hard.jsonl").read_bytes())
    easy, hard = config.data.mixture
    data = config.data.model_copy(update={"mixture": (easy, hard.model_copy(update={"path": url}))})
    afar = config.model_copy(update={"data": data})
    assert trained(tmp_path / "afar", afar, ("rollout", "00-001")) == local


def test_a_mixture_tells_its_rewards_by_source(tiny_assets: Path, tmp_path: Path) -> None:
    config = config_of(tiny_assets, tmp_path, "mixture")
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        selection = last_selection(run, 0)
        metrics = selection.metrics
        assert all(find_metric(name) is not None for name in shown_metrics(selection))
        sources = [json.loads(row["metadata"])["source"] for row in rollout_rows(run, 0)]
        assert sorted(sources) == ["easy", "hard", "hard", "hard"]
        assert (metrics["source/easy/samples"], metrics["source/hard/samples"]) == (4, 12)
        parts = metrics["source/easy/raw_reward"] * 4 + metrics["source/hard/raw_reward"] * 12
        assert parts / 16 == pytest.approx(metrics["raw_reward"], rel=1e-12)


def test_prompts_of_the_window_come_back_and_others_do_not(tiny_assets: Path, tmp_path: Path) -> None:
    """What comes back is worked out anew from the rewards that were committed."""
    config = config_of(tiny_assets, tmp_path, "curriculum")
    low, high = config.data.curriculum.low, config.data.curriculum.high
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        waiting: list[int] = []
        for index in range(3):
            iteration(run, DirectSteps(run), index)
            rows = rollout_rows(run, index)
            drawn = [row["prompt_index"] for row in rows]
            returning, waiting = waiting[:2], waiting[2:]
            assert drawn[: len(returning)] == returning
            graded = run.read(run.committed(index, Step.REWARD, "00-000")).to_pylist()
            for group, prompt in zip([row["group_id"] for row in rows], drawn, strict=True):
                rewards = [row["reward"] for row in graded if row["group_id"] == group]
                if low <= sum(rewards) / len(rewards) <= high:
                    waiting.append(prompt)
            assert last_selection(run, index).values["cursor"]["drawn"] == 4 * (index + 1)  # type: ignore[index, call-overload]


def test_a_source_with_a_state_is_told_what_became_of_its_prompts(tiny_assets: Path, tmp_path: Path) -> None:
    config = config_of(tiny_assets, tmp_path, "source")
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        level = 3
        for index in range(3):
            iteration(run, DirectSteps(run), index)
            assert {json.loads(row["metadata"])["level"] for row in rollout_rows(run, index)} == {level}
            rewards = run.read(run.committed(index, Step.REWARD, "00-000")).column("reward").to_numpy()
            level += 1 if rewards.mean() > 0.3 else -1


def test_results_are_told_once_whatever_the_rounds(tiny_assets: Path, tmp_path: Path) -> None:
    """Where a round is refilled its successor is told of its groups alone, and the next iteration of the last's."""
    config = config_of(tiny_assets, tmp_path, "curriculum")
    (tmp_path / "odd.py").write_text(
        "import cairn\n\n\n"
        "def keep(rewards):\n    return cairn.FilterDecision(keep=bool(rewards[0] > 0.36), reason='')\n"
    )
    rollout = {**config.rollout.model_dump(), "dynamic_sampling_filter": f"{tmp_path / 'odd.py'}:keep"}
    config = tiny_config(tiny_assets, data=config.data.model_dump(), rollout=rollout | {"max_refill_rounds": 40})
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        reported = []
        for index in range(2):
            iteration(run, DirectSteps(run), index)
            selections = [commit for commit in run.ledger.commits(index) if commit.step is Step.FILTER]
            assert len(selections) > 1
            reported += [group.group_id for commit in selections for group in round_results(run, commit)]
        groups = [row["group_id"] for index in range(2) for row in rollout_rows(run, index)]
        assert sorted(reported) == sorted(groups)


def test_a_run_is_not_resumed_with_another_source(tiny_assets: Path, tmp_path: Path) -> None:
    config = config_of(tiny_assets, tmp_path, "mixture")
    with tiny_context(str(tmp_path / "store"), config):
        pass
    with (tmp_path / "hard.jsonl").open("a") as file:
        file.write('{"prompt": "one more", "label": ""}\n')
    with (
        pytest.raises(RunDiffers, match=r"digest of data\.mixture\.hard"),
        tiny_context(str(tmp_path / "store"), config),
    ):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("1 / 0", r"get_samples' failed with ZeroDivisionError"),
        ("return 7", r"returned 7: let it return \(rows, state\)"),
        ("return [{'prompt': 'a'}], None", "returned 1 rows where 4 were requested"),
        (
            "return [{'text': 'a'}] * count, None",
            "returned a row without the field 'prompt', which data.input_key names",
        ),
        ("return [{'prompt': 'a'}] * count, {1}", r"are not JSON \(.*set"),
        ("return [{'prompt': 'a'}] * count, __import__('json').loads('[' * 300 + ']' * 300)", "nested deeper"),
        ("return [{'prompt': 'a', 'metadata': 3}] * count, None", "'metadata' is not a mapping"),
        ("return [{'prompt': 'a' * 900}] * count, None", "none of the last 100 rounds of prompts"),
    ],
)
def test_a_source_with_a_state_that_gives_something_else_is_named(
    tiny_assets: Path, tmp_path: Path, body: str, says: str
) -> None:
    config = config_of(tiny_assets, tmp_path, "source")
    (tmp_path / "source.py").unlink()
    (tmp_path / "broken.py").write_text(f"def get_samples(path, state, count, results):\n    {body}\n")
    data = config.data.model_copy(update={"get_samples_path": f"{tmp_path / 'broken.py'}:get_samples"})
    prompts = StatefulPrompts(data, load_tokenizer(config.model.path))
    with pytest.raises(BadData, match=says):
        prompts.draw(0, 4, (), max_prompt_len=200)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "failed with TypeError"),
        ("return [99], None", r"chose 1 prompts, \[99\] first: let it choose at most 2, each from 0 to 23"),
        ("return [1] * 3, None", "chose 3 prompts"),
        ("return [], {1}", "failed with TypeError"),
    ],
)
def test_a_curriculum_that_returns_something_else_is_named(
    tiny_assets: Path, tmp_path: Path, body: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def choose(state, results, count, config):\n    {body}\n")
    config = tiny_config(
        tiny_assets,
        data={"path": str(tiny_assets / "train.jsonl"), "curriculum": {"policy": f"{tmp_path / 'mine.py'}:choose"}},
    )
    data = PromptData.open(config.data, config.data.path, load_tokenizer(config.model.path))
    with pytest.raises(BadData, match=says):
        next_prompts(config, data, 0, 4, (), max_prompt_len=None)


def test_a_source_with_a_state_is_told_of_rounds_that_no_prompt_follows(tiny_assets: Path, tmp_path: Path) -> None:
    """Where a round only continues what was begun, or a batch is filled from the buffer and nothing is generated."""
    (tmp_path / "told.py").write_text(
        "def get(path, state, count, results):\n"
        "    told = (state or []) + [result.prompt_index for result in results]\n"
        "    return [{'prompt': f'{len(told)} {i}', 'label': '1'} for i in range(count)], told\n"
    )
    base = tiny_config(tiny_assets)
    source = {"path": "x", "get_samples_path": f"{tmp_path / 'told.py'}:get", "apply_chat_template": False}
    config = base.model_copy(update={"data": base.data.model_copy(update=source)})
    with tiny_context(str(tmp_path / "made"), base) as (run, _):
        tokenizer = run.tokenizer
    prompts = StatefulPrompts(config.data, tokenizer)

    def result(index: int) -> GroupResult:
        return GroupResult(index, index, "1", {}, 0.5, 0.5, True, None, 0.5)

    first = prompts.draw(0, 2, (), max_prompt_len=None)
    continued = prompts.draw(first.cursor, 0, (result(0), result(1)), max_prompt_len=None)
    assert continued.rows == []
    last = prompts.draw(continued.cursor, 2, (result(2),), max_prompt_len=None)
    assert last.cursor == {"drawn": 4, "state": [0, 1, 2]}


def test_results_are_told_after_an_iteration_that_generated_nothing(tiny_assets: Path, tmp_path: Path) -> None:
    """The first iteration finishes twice what it needs at once, so the second one is filled from the buffer."""
    twice = {"over_sampling_batch_size": 8, "partial_rollout": True, "cut_tokens": 5, "max_age": 1}
    config = config_of(tiny_assets, tmp_path, "source", **twice)
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        first, second = (last_selection(run, index) for index in range(2))
        assert not [commit for commit in run.ledger.commits(1) if commit.step is Step.ROLLOUT]
        assert unreported_results(run, second) == round_results(run, first) != ()
        levels = {json.loads(row["metadata"])["level"] for row in rollout_rows(run, 2)}
        assert levels != {3}, "the source learned of the first iteration"
