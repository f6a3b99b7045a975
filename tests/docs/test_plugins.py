"""The examples of docs/plugins.md, each a file outside the tree, in a run of the real thing."""

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.view import UndeclaredRead
from cairn.engines.training.aggregations import token_weights
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.trajectories import call_seed
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import MEASURED
from cairn.storage.store.errors import RunDiffers
from cairn.tasks.batch.batch import arrays, trained_shards
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.evaluation.evaluate import evaluate
from cairn.tasks.steps import stale_steps
from tests.docs.examples import examples_of, write_examples
from tests.local_fleet import LocalFleet, dying_after
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

pytestmark = pytest.mark.proof
EXAMPLES = examples_of("plugins.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_examples("plugins.md", tmp_path)


def run_once(folder: Path, assets: Path, **sections: dict[str, Any]) -> Iterator[RunContext]:
    config = tiny_config(assets, **sections)
    assert setup_problems(config) == []
    with tiny_context(str(folder / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        yield run


def tiny_rollout() -> dict[str, Any]:
    return {"num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 12}


def by_group(table: Any) -> list[list[dict[str, Any]]]:
    rows = table.to_pylist()
    return [[row for row in rows if row["group_id"] == id] for id in dict.fromkeys(row["group_id"] for row in rows)]


def rewards_of(run: RunContext) -> np.ndarray:
    rewards: np.ndarray = run.read(run.committed(0, Step.ADVANTAGE)).column("reward").to_numpy()
    return rewards


def stale(run: RunContext, option: str) -> set[str]:
    """Steps that another source of what an option names makes stale."""
    return {step for _, step, _, _ in stale_steps(run.ledger, run.config, {f"{option}:modules": "0" * 64})}


def test_an_estimator(folder: Path, tiny_assets: Path) -> None:
    option = {"advantage_estimator": f"{folder / 'median.py'}:estimate", "use_rollout_logprobs": True}
    for run in run_once(folder, tiny_assets, algorithm=option):
        found = [values[0] for values in arrays(run.read(run.committed(0, Step.ADVANTAGE)), "advantages")]
        groups = rewards_of(run).reshape(-1, 4).astype(float)
        assert groups.std(axis=1).min() > 0
        np.testing.assert_allclose(found, (groups - np.median(groups, 1, keepdims=True)).ravel(), atol=1e-6)
        assert stale(run, "algorithm.advantage_estimator") == {"advantage", "train", "sync"}


def test_an_estimator_that_needs_scores_and_reads_options(folder: Path, tiny_assets: Path) -> None:
    path = f"{folder / 'anchored.py'}:estimate"
    option = {"advantage_estimator": path, "use_rollout_logprobs": True, "kl_loss_coef": 0.5}
    for run in run_once(folder, tiny_assets, algorithm=option, training={"lr": 1e-2, "num_threads": 1}):
        iteration(run, DirectSteps(run), 1)
        scored, estimated = (run.read(run.committed(1, step)) for step in (Step.SCORE, Step.ADVANTAGE))
        rollout = run.read(run.committed(1, Step.ROLLOUT, "00-000"))
        columns = (arrays(scored, "ref_log_probs"), arrays(rollout, "log_probs"), arrays(estimated, "advantages"))
        rewards = estimated.column("reward").to_numpy()
        pairs = list(zip(rewards, *columns, strict=True))
        for reward, reference, policy, advantage in pairs:
            np.testing.assert_allclose(advantage, reward - 0.5 * (policy - reference), atol=1e-5)
        assert max(np.abs(reference - policy).max() for _, reference, policy, _ in pairs) > 1e-4
        changed = tiny_config(tiny_assets, algorithm={**option, "kl_loss_coef": 0.25})
        assert (0, "advantage", None, "algorithm.kl_loss_coef") in stale_steps(run.ledger, changed, {})
    code = EXAMPLES["anchored.py"].replace(', reads={"kl_loss_coef"}', "")
    (folder / "secretive.py").write_text(code)
    option["advantage_estimator"] = f"{folder / 'secretive.py'}:estimate"
    with pytest.raises(UndeclaredRead, match=r"step advantage reads algorithm\.kl_loss_coef without declaring it"):
        next(run_once(folder / "again", tiny_assets, algorithm=option))


def test_a_loss_that_needs_values_has_a_critic_and_one_may_read_what_losses_do_not(
    folder: Path, tiny_assets: Path
) -> None:
    (folder / "baseline.py").write_text(
        "import cairn\n\n\n"
        "@cairn.plugin(needs={'advantages', 'values'}, reads={'gamma'})\n"
        "def loss(log_probs, tokens, config):\n"
        "    return -log_probs * (tokens.advantages * config.gamma - tokens.values), {'value': tokens.values}\n"
    )
    option = {"loss_type": f"{folder / 'baseline.py'}:loss", "use_rollout_logprobs": True, "gamma": 0.5}
    for run in run_once(folder, tiny_assets, algorithm=option):
        metrics = run.committed(0, Step.TRAIN).metrics
        values = arrays(run.read(run.committed(0, Step.SCORE)), "values")
        means = [sample.mean() for sample in values]
        assert metrics["value"] == pytest.approx(np.mean(means), rel=1e-4)
        assert {"value_loss", "critic_grad_norm"} <= metrics.keys()
        changed = tiny_config(tiny_assets, algorithm={**option, "gamma": 0.9})
        assert {step for _, step, _, _ in stale_steps(run.ledger, changed, {})} >= {"score", "train", "sync"}


def test_a_loss(folder: Path, tiny_assets: Path) -> None:
    option = {"loss_type": f"{folder / 'gmpo.py'}:loss", "use_rollout_logprobs": True}
    for run in run_once(folder, tiny_assets, algorithm=option):
        trained = run.committed(0, Step.TRAIN)
        assert trained.metrics["geometric_ratio"] == pytest.approx(1, abs=1e-3)
        assert trained.metrics["grad_norm"] > 0
        assert {"pg_loss", "entropy_loss", "train_rollout_logprob_abs_diff"} <= trained.metrics.keys()
        assert "pg_clipfrac" not in trained.metrics  # that of the built-in loss
        assert stale(run, "algorithm.loss_type") == {"train", "sync"}


def test_a_loss_that_needs_a_teacher(folder: Path, tiny_assets: Path) -> None:
    (folder / "taught.py").write_text(
        "import cairn\n\n\n"
        "@cairn.plugin(needs={'advantages', 'teacher_log_probs'})\n"
        "def loss(log_probs, tokens, config):\n"
        "    return (log_probs - tokens.teacher_log_probs) ** 2, {'apart': log_probs - tokens.teacher_log_probs}\n"
    )
    option = {"loss_type": f"{folder / 'taught.py'}:loss", "use_rollout_logprobs": True}
    model = str(tiny_assets / "model")
    for run in run_once(folder, tiny_assets, algorithm=option, model={"path": model, "teacher_path": model}):
        assert run.committed(0, Step.TRAIN).metrics["apart"] == pytest.approx(0, abs=1e-5)
        assert "teacher_log_probs" in run.read(run.committed(0, Step.SCORE)).column_names


def test_an_off_policy_correction(folder: Path, tiny_assets: Path) -> None:
    path = f"{folder / 'agreement.py'}:correct"
    option = {"use_rollout_logprobs": False, "use_tis": True, "custom_tis_function_path": path}
    for run in run_once(folder, tiny_assets, algorithm=option):
        metrics = run.committed(0, Step.TRAIN).metrics
        assert metrics["apart"] == pytest.approx(metrics["train_rollout_logprob_abs_diff"])
        assert metrics["apart"] > 0
        assert "tis_clipfrac" not in metrics
        assert metrics["grad_norm"] > 0
        assert stale(run, "algorithm.custom_tis_function_path") == {"train", "sync"}
    (folder / "none.py").write_text(EXAMPLES["agreement.py"].replace("(-apart).exp()", "0 * apart"))
    option |= {"custom_tis_function_path": f"{folder / 'none.py'}:correct"}
    for run in run_once(folder / "none", tiny_assets, algorithm=option):
        assert run.committed(0, Step.TRAIN).metrics["grad_norm"] == 0


def test_an_aggregation(folder: Path, tiny_assets: Path) -> None:
    path = f"{folder / 'longest.py'}:weigh"
    option = {"use_rollout_logprobs": True, "custom_pg_loss_reducer_function_path": path}
    for run in run_once(folder, tiny_assets, algorithm=option):
        advantages = arrays(run.read(run.committed(0, Step.ADVANTAGE)), "advantages")
        sums, counts = [values.sum() for values in advantages], [len(values) for values in advantages]
        trained = run.committed(0, Step.TRAIN)
        assert len(set(counts)) > 1, "or it would be the mean"
        assert trained.metrics["pg_loss"] == pytest.approx(-sum(sums) / (16 * max(counts)), abs=1e-4)
        assert stale(run, "algorithm.custom_pg_loss_reducer_function_path") == {"train", "sync"}
    (folder / "wrong.py").write_text("def weigh(counts, config):\n    return 1.0\n")
    algorithm = AlgorithmConfig(custom_pg_loss_reducer_function_path=f"{folder / 'wrong.py'}:weigh")
    with pytest.raises(BadPlugin, match=r"wrong.py:weigh' returned something else than a number for each of the 2"):
        token_weights([3, 4], algorithm)


def test_a_correction_that_returns_something_else_is_named(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def correct(tokens, config):\n    return tokens.old_log_probs\n")
    path = f"{tmp_path / 'wrong.py'}:correct"
    option = {"use_rollout_logprobs": False, "use_tis": True, "custom_tis_function_path": path}
    with pytest.raises(BadPlugin, match=r"the off-policy correction .*wrong.py:correct' returned something else than"):
        next(run_once(tmp_path, tiny_assets, algorithm=option))


def test_a_grader(folder: Path, tiny_assets: Path) -> None:
    for run in run_once(folder, tiny_assets, reward={"custom_rm_path": f"{folder / 'brevity.py'}:grade"}):
        graded = run.read(next(c for c in run.ledger.commits(0) if c.step is Step.REWARD))
        for row in graded.to_pylist():
            low = json.loads(row["components"])["low"]
            assert row["reward"] == pytest.approx(low - 0.01 * round((low - row["reward"]) / 0.01), abs=1e-6)


def test_a_grader_that_waits(folder: Path, tiny_assets: Path) -> None:
    for run in run_once(folder, tiny_assets, reward={"custom_rm_path": f"{folder / 'asked.py'}:grade"}):
        rows = graded_rows(run)
        assert [row["reward"] for row in rows] == [len(row["response_text"]) % 5 for row in rows]
        assert list((folder / "store" / "answers").glob("*/*.arrow")), "they are kept"


def test_a_grader_of_groups(folder: Path, tiny_assets: Path) -> None:
    option = {"custom_rm_path": f"{folder / 'compared.py'}:grade", "group_rm": True}
    for run in run_once(folder, tiny_assets, reward=option):
        rows = graded_rows(run)
        for row in rows:
            lengths = [len(other["response_ids"]) for other in rows if other["group_id"] == row["group_id"]]
            longer = sum(len(row["response_ids"]) < length for length in lengths)
            assert row["reward"] == pytest.approx(longer / len(lengths))


def graded_rows(run: RunContext) -> list[dict[str, Any]]:
    rows = [run.read(run.committed(0, step, "00-000")).to_pylist() for step in (Step.ROLLOUT, Step.REWARD)]
    return [{**sampled, **graded} for sampled, graded in zip(*rows, strict=True)]


def test_a_data_source_whose_rows_a_run_is_held_to(folder: Path, tiny_assets: Path) -> None:
    path = str(folder / "more.jsonl")
    Path(path).write_text(json.dumps({"prompt": "Sort the digits 1 2 3", "label": "123"}) + "\n")
    option = {"path": f"6,{path}@[1:]", "data_source_path": f"{folder / 'sums.py'}:rows", "apply_chat_template": False}
    option["rollout_shuffle"] = False
    for run in run_once(folder, tiny_assets, data=option):
        shard = run.read(run.committed(0, Step.ROLLOUT, "00-000"))
        asked = dict(zip(shard.column("prompt_text").to_pylist(), shard.column("label").to_pylist(), strict=True))
        assert asked == {"3 + 7 =": "10", "7 + 4 =": "11", "1 + 1 =": "2", "4 + 8 =": "12"}
        assert stale(run, "data.data_source_path") >= {"rollout", "train"}
    config = tiny_config(tiny_assets, data=option)
    with tiny_context(str(folder / "store"), config) as (run, events):
        iteration(run, DirectSteps(run), 0)
        assert events.executed() == []
    Path(path).write_text(json.dumps({"prompt": "Sort the digits 1 2 4", "label": "124"}) + "\n")
    with (
        pytest.raises(RunDiffers, match=r"digest of data is '\w+' in the ledger, '\w+' now\. Give the new run"),
        tiny_context(str(folder / "store"), config),
    ):
        pass


def test_a_data_source_with_a_state(folder: Path, tiny_assets: Path) -> None:
    option = {"path": "0.3", "get_samples_path": f"{folder / 'harder.py'}:get_samples", "apply_chat_template": False}
    for run in run_once(folder, tiny_assets, data=option):
        assert last_selection(run, 0).values["cursor"] == {"drawn": 4, "state": {"terms": 2, "asked": 4}}
        iteration(run, DirectSteps(run), 1)
        terms = 3 if rewards_of(run).mean() > 0.3 else 2
        asked = run.read(run.committed(1, Step.ROLLOUT, "00-000")).column("prompt_text").to_pylist()
        assert {text.count("+") for text in asked} == {terms - 1}
        assert stale(run, "data.get_samples_path") >= {"rollout", "train"}


def test_a_curriculum(folder: Path, tiny_assets: Path) -> None:
    (folder / "nothing.py").write_text(
        "def grade(response, label, metadata):\n    return 0.0 if int(label) % 2 else 1.0\n"
    )
    data = {"path": str(tiny_assets / "train.jsonl"), "rollout_shuffle": False}
    data |= {"curriculum": {"policy": f"{folder / 'missed.py'}:choose"}}
    reward = {"custom_rm_path": f"{folder / 'nothing.py'}:grade"}
    for run in run_once(folder, tiny_assets, data=data, reward=reward):
        iteration(run, DirectSteps(run), 1)
        shard = run.read(run.committed(1, Step.ROLLOUT, "00-000"))
        assert shard.column("prompt_index").to_pylist()[::4] == [1, 3, 4, 5]
        assert stale(run, "data.curriculum.policy") >= {"rollout", "train"}


def test_a_filter(folder: Path, tiny_assets: Path) -> None:
    path = f"{folder / 'spread.py'}:keep"
    sections: dict[str, dict[str, Any]] = {
        "rollout": {
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            "dynamic_sampling_filter": path,
            "max_refill_rounds": 2,
        }
    }
    for run in run_once(folder, tiny_assets, **sections):
        decided = [c for c in run.ledger.commits(0) if c.step is Step.FILTER][-1]
        rows = run.read(decided).to_pylist()
        assert {row["reason"] for row in rows if not row["kept"]} <= {"alike", "surplus"}
        assert all(row["std_reward"] > 0.05 or row["reason"] is None or row["reason"] == "alike" for row in rows)


FATES = ("train", "buffer", "drop")


def test_a_buffer_policy(folder: Path, tiny_assets: Path) -> None:
    sections = {
        "num_rollout": 3,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 12,
        "max_age": 1,
        "buffer_filter_path": f"{folder / 'hardest_first.py'}:order",
    }
    for run in run_once(folder, tiny_assets, rollout=sections):
        iteration(run, DirectSteps(run), 1)
        ages = []
        for index in range(2):
            rows = run.read(last_selection(run, index)).to_pylist()
            rewards = {fate: [row["mean_reward"] for row in rows if row["disposition"] == fate] for fate in FATES}
            assert [len(rewards[fate]) for fate in FATES] == [2, 2 - index, index]
            assert rewards["train"] == sorted(row["mean_reward"] for row in rows)[:2]
            ages += [row["age"] for row in rows]
        assert max(ages) == 1, "groups of the first iteration compete in the second"
        assert stale(run, "rollout.buffer_filter_path") >= {"filter", "advantage", "train", "sync"}


def test_a_filter_of_samples(folder: Path, tiny_assets: Path) -> None:
    sections = {"dynamic_sampling_filter": f"{folder / 'answered.py'}:keep", "rollout_stop_token_ids": [*range(3, 10)]}
    for run in run_once(folder, tiny_assets, rollout={**tiny_rollout(), **sections, "max_refill_rounds": 2}):
        selection = last_selection(run, 0)
        rows = {row["group_id"]: row for row in run.read(selection).to_pylist()}
        reasons = [row["reason"] for row in rows.values()]
        for commit in (one for one in run.ledger.commits(0) if one.step is Step.ROLLOUT):
            for group in by_group(run.read(commit)):
                cut = sum(row["finish_reason"] == "length" for row in group)
                row = rows[group[0]["group_id"]]
                assert (row["reason"] == "cut" or row["disposition"] == "train") == (2 * cut > 4 or row["kept"])
                assert row["priority"] == -sum(len(sample["response_ids"]) for sample in group) / 4
        assert selection.metrics.get("dynamic_filter/drop_cut", 0) <= reasons.count("cut")
        assert stale(run, "rollout.dynamic_sampling_filter") >= {"filter", "advantage", "train"}


def test_a_sample_filter(folder: Path, tiny_assets: Path) -> None:
    """Three samples in four say nothing, so that several are the same."""
    sections = {"rollout_sample_filter_path": f"{folder / 'once.py'}:remove", "rollout_max_response_len": 1}
    for run in run_once(folder, tiny_assets, rollout={**tiny_rollout(), **sections, "n_samples_per_prompt": 48}):
        selection = last_selection(run, 0)
        rollouts, _ = trained_shards(run, selection)
        trained = train_batch(run, selection, rollouts)
        removed = {row["group_id"]: row["removed"] for row in run.read(selection).to_pylist()}
        assert selection.metrics["sample_filter/removed"] == sum(map(len, removed.values())) > 0
        seen: set[tuple[int, ...]] = set()
        for place, (group, ids, mask) in enumerate(
            zip(trained.groups, trained.input_ids, trained.loss_mask, strict=True)
        ):
            sample = (group, *ids.tolist())
            assert (sample in seen) == (place % 48 in removed[group]) == (not mask.any())
            seen.add(sample)
        advantages = arrays(run.read(run.committed(0, Step.ADVANTAGE)), "advantages")
        rewards = rewards_of(run).reshape(-1, 48).astype(float)
        expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose([one[0] for one in advantages], expected.ravel(), atol=1e-5)
        assert stale(run, "rollout.rollout_sample_filter_path") >= {"filter", "advantage", "train"}


def test_a_benchmark_metric(folder: Path, tiny_assets: Path) -> None:
    (folder / "third.py").write_text(
        "def grade(response, label, metadata):\n"
        "    if label == '3':\n        raise ValueError('no idea')\n"
        "    return len(response) % 2\n"
    )
    benchmark = {
        "name": "heldout",
        "path": str(tiny_assets / "heldout.jsonl"),
        "max_response_len": 6,
        "n_samples_per_eval_prompt": 4,
        "metric": f"{folder / 'pass_at_k.py'}:measure",
    }
    sections: dict[str, dict[str, Any]] = {
        "reward": {"custom_rm_path": f"{folder / 'third.py'}:grade"},
        "eval": {"eval_interval": 1, "benchmarks": [benchmark]},
    }
    config = tiny_config(tiny_assets, **sections)
    assert setup_problems(config) == []
    with tiny_context(str(folder / "store"), config) as (run, _):
        commit = evaluate(run, 0, "heldout-v000000", None, name="heldout")
        rows = run.read(commit).to_pylist()
        right = [[row["reward"] or 0 for row in rows if row["prompt_index"] == question] for question in range(4)]
        assert right[3] == [0, 0, 0, 0]
        assert commit.metrics["heldout-failed_samples"] == 4
        assert commit.metrics["heldout"] == np.mean(right)
        assert commit.metrics["eval/heldout/metric/pass@1"] == np.mean(right)
        pairs = [[max(pair) for pair in combinations(question, 2)] for question in right]
        assert commit.metrics["eval/heldout/metric/pass@2"] == pytest.approx(np.mean(pairs))
        assert commit.metrics["eval/heldout/metric/pass@4"] == np.mean([max(question) for question in right])
        assert 0 < np.mean(right) < np.mean(pairs) < 1
        assert stale(run, "eval.benchmarks.metric") == {"eval"}
    wrong = [benchmark | {"name": "first"}, benchmark | {"metric": f"{folder / 'pass_at_k.py'}:comb"}]
    (problem,) = setup_problems(tiny_config(tiny_assets, eval={"eval_interval": 1, "benchmarks": wrong}))
    assert problem.startswith("eval.benchmarks.1.metric: the benchmark metric ")
    assert problem.endswith("let it take (samples)")


def test_a_generate_function_of_several_trajectories(folder: Path, tiny_assets: Path) -> None:
    option = {"custom_generate_function_path": f"{folder / 'anew.py'}:generate"}
    for run in run_once(folder, tiny_assets, rollout=option):
        rows = run.read(run.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
        selection = last_selection(run, 0)
        batch = train_batch(run, selection, trained_shards(run, selection)[0])
        assert batch.samples == [sample for sample in range(16) for _ in range(2)]
        sequences = iter(zip(batch.input_ids, batch.loss_mask, strict=True))
        for row in rows:
            length, rest = row["trajectories"]
            first, second = row["response_ids"][:length], row["response_ids"][length:]
            note = len(first[-4:])
            assert second[:note] == first[-4:]
            for expected, given in ((first, 0), (second, note)):
                ids, mask = next(sequences)
                assert ids.tolist() == row["prompt_ids"] + expected
                assert mask.tolist() == [0] * given + [1] * (len(expected) - given)
            assert row["response_text"] == run.tokenizer.decode(second, skip_special_tokens=True)
            assert len(second) == rest
        assert run.committed(0, Step.TRAIN).metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_generate_function_that_is_killed_in_between_ends_in_the_undisturbed_weights(
    folder: Path, tiny_assets: Path
) -> None:
    option = {"custom_generate_function_path": f"{folder / 'turns.py'}:generate", "num_rollout": 1}
    (folder / "second.py").write_text(
        "def grade(sample):\n"
        "    first, asked, second = sample.segments\n"
        "    assert (first.sampled, asked.sampled, second.sampled) == (True, False, True)\n"
        "    assert first.ids + asked.ids + second.ids == sample.response_ids\n"
        "    assert asked.text == 'Sort the digits'\n"
        "    return sum(second.ids) % 7\n"
    )
    reward = {"custom_rm_path": f"{folder / 'second.py'}:grade"}
    config = tiny_config(tiny_assets, rollout=option, reward=reward)
    (whole,) = run_once(folder, tiny_assets, rollout=option, reward=reward)
    rows = whole.read(whole.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
    world = whole.tokenizer.encode("Sort the digits", add_special_tokens=False)
    selection = last_selection(whole, 0)
    batch = train_batch(whole, selection, trained_shards(whole, selection)[0])
    for row, ids, mask in zip(rows, batch.input_ids, batch.loss_mask, strict=True):
        first, asked, second = row["segments"]
        assert (first["call"], asked["call"], second["call"]) == ("0", None, "1")
        assert (first["seed"], second["seed"]) == (row["seed"], call_seed(row["seed"], "1"))
        start, end = first["tokens"], first["tokens"] + len(world)
        assert row["response_ids"][start:end] == world
        assert ids.tolist() == row["prompt_ids"] + row["response_ids"]
        assert mask.tolist() == [1] * start + [0] * len(world) + [1] * second["tokens"], "the world is not trained on"
    assert stale(whole, "rollout.custom_generate_function_path") >= {"rollout", "train", "sync"}

    fleet = dying_after(LocalFleet(config), 16 + 6)  # all first turns, and some second ones
    store = str(folder / "killed")
    with tiny_context(store, config, fleet=fleet) as (run, _), pytest.raises(KeyboardInterrupt):
        iteration(run, DirectSteps(run), 0)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        replayed = run.read(run.committed(0, Step.ROLLOUT, "00-000")).drop_columns([*MEASURED])
        assert replayed.equals(whole.read(whole.committed(0, Step.ROLLOUT, "00-000")).drop_columns([*MEASURED]))
        assert train_digests(run, [0]) == train_digests(whole, [0])


def test_a_generate_function_that_is_none_is_refused_before_anything_starts(tiny_assets: Path, tmp_path: Path) -> None:
    code = "def generate(ctx, sample): ...\n\n\nasync def other(sample): ...\n"
    (tmp_path / "wrong.py").write_text(code)
    wrong = {"generate": "is a plain function: let it be a coroutine function", "other": "let it take (ctx, sample)"}
    for name, told in wrong.items():
        option = {"custom_generate_function_path": f"{tmp_path / 'wrong.py'}:{name}"}
        config = tiny_config(tiny_assets, rollout=option)
        (problem,) = setup_problems(config)
        assert problem.startswith("rollout.custom_generate_function_path: ")
        assert told in problem


def test_a_generate_function_that_ends_its_process_fails_the_try_and_one_that_raises_its_sample(
    tiny_assets: Path, tmp_path: Path
) -> None:
    code = """
import os

from cairn import Trajectory


async def generate(ctx, sample):
    if sample.group_id == 1:
        os._exit(3)
    if sample.group_id == 2 and sample.index == 3:
        raise ValueError("no such tool")
    return Trajectory([await ctx.sample(sample.prompt_ids)])
"""
    (tmp_path / "bad.py").write_text(code)
    config = tiny_config(
        tiny_assets,
        rollout={"custom_generate_function_path": f"{tmp_path / 'bad.py'}:generate", "num_rollout": 1},
    )
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        for _ in range(3):
            with pytest.raises(GenerationFailed, match=r"the process of .*bad.py:generate ended with exit code 3"):
                iteration(run, DirectSteps(run), 0)
        iteration(run, DirectSteps(run), 0)
        failed = {
            row["group_id"]: row["error"]
            for row in run.read(run.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
            if row["error"] is not None
        }
        assert failed.keys() == {1, 2}
        assert failed[2].startswith("generate: ValueError: no such tool (bad.py:")
        assert "ended with exit code 3" in failed[1]
