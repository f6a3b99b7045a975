"""`cairn plan`: what it prints, how it ends, and what it says of input that makes no sense."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from tests.architectures import architecture
from tests.flows.plan.layouts import LAYOUTS
from tests.tiny_run import tiny_config


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def written(path: Path, config: Any) -> Path:
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of Qwen3-4B on eight GPUs, as a published layout has it."""
    return written(tmp_path / "qwen.yaml", LAYOUTS[0].config)


def test_a_recipe_that_fits_ends_with_0_and_a_table(recipe: Path) -> None:
    result = plan(recipe)
    assert result.exit_code == 0
    for what in ("4.022", "weights", "gradients", "optimizer", "keys and values", "sync: 7.49 GiB", "an iteration:"):
        assert what in result.stdout


def test_json_holds_what_the_table_shows(recipe: Path) -> None:
    found = json.loads(plan(recipe, "--json").stdout)
    assert found["fits"] is True
    assert found["model"]["parameters"] == 4_022_468_096
    assert found["gpus"] == 8
    assert [memory["of"] for memory in found["memory"]] == [
        "a GPU that trains",
        "a GPU that generates",
        "a machine's own memory",
    ]
    assert found["seconds"] == pytest.approx(sum(step["seconds"] for step in found["steps"]))


def test_the_whole_run_is_told_in_hours_and_money(recipe: Path) -> None:
    options = ("--set", "rollout.num_rollout=100", "--price", "2.5")
    found = json.loads(plan(recipe, *options, "--json").stdout)
    hours = 100 * found["seconds"] / 3600
    assert found["run"]["gpu_hours"] == pytest.approx(8 * hours)
    assert found["run"]["price"] == pytest.approx(20 * hours)
    line = next(line for line in plan(recipe, *options).stdout.splitlines() if line.startswith("the run: "))
    assert f"100 iterations, {hours:.1f} h, {8 * hours:,.0f} GPU-hours, price {20 * hours:,.0f}" in line


def test_ranks_that_share_sequences_divide_the_activations_of_the_torch_engine(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    kept = ("world_size", "num_gpus_per_rank", "global_batch_size", "num_steps_per_rollout")
    own = {name: value for name, value in values["training"].items() if name in kept}
    values["training"] = {**own, "engine": "torch", "dtype": "bfloat16", "micro_batch_size": 1}
    recipe.write_text(yaml.safe_dump(values))

    def activations(ranks: int) -> float:
        found = json.loads(plan(recipe, "--set", f"training.context_parallel_size={ranks}", "--json").stdout)
        rows: list[dict[str, Any]] = found["memory"][0]["rows"]
        return next(float(row["bytes"]) for row in rows if row["what"] == "activations")

    assert activations(2) == pytest.approx(activations(1) / 2, rel=1e-3)
    problems = json.loads(plan(recipe, "--set", "training.context_parallel_size=4", "--json").stdout)["problems"]
    assert problems == []


def test_what_does_not_fit_ends_with_1_and_every_remedy_fits(recipe: Path) -> None:
    too_much = ("--set", "training.max_tokens_per_gpu=262144", "--json")
    result = plan(recipe, *too_much)
    assert result.exit_code == 1
    remedies = json.loads(result.stdout)["remedies"]
    assert remedies
    for remedy in remedies:
        options = [word for name, value in remedy["options"].items() for word in ("--set", f"{name}={value}")]
        changed = plan(recipe, *too_much, *options)
        assert changed.exit_code == 0
        memory = next(one for one in json.loads(changed.stdout)["memory"] if one["of"] == remedy["of"])
        assert sum(row["bytes"] for row in memory["rows"]) == pytest.approx(remedy["highest"])


def test_a_layout_that_does_not_divide_is_told_and_ends_with_1(recipe: Path) -> None:
    odd = plan(recipe, "--set", "rollout.num_gpus_per_engine=3", "--gpus-per-node", "9")
    assert odd.exit_code == 1
    assert "cut over 3 ranks, which must divide the model's 32 attention heads" in odd.stdout


def test_another_gpu_changes_the_memory_and_the_time(recipe: Path) -> None:
    first, second = (json.loads(plan(recipe, "--json", "--gpu", gpu).stdout) for gpu in ("H100", "b200"))
    assert second["memory"][0]["capacity"] > 2 * first["memory"][0]["capacity"]
    assert second["seconds"] < first["seconds"] / 1.5


def test_rates_and_lengths_that_are_given_are_reckoned_with(recipe: Path) -> None:
    def seconds(step: str, *options: str) -> float:
        steps = json.loads(plan(recipe, "--json", *options).stdout)["steps"]
        return next(one["seconds"] for one in steps if one["step"] == step)

    assert seconds("train", "--mfu", "0.7") == pytest.approx(seconds("train") / 2)
    assert seconds("rollout", "--mbu", "1") == pytest.approx(seconds("rollout") / 2, rel=0.05)
    assert seconds("train", "--response-tokens", "8000") > 1.8 * seconds("train")
    assert seconds("train", "--prompt-tokens", "1000") > seconds("train")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--gpu", "h10"], "there is no GPU 'h10' among a100-40gb"),
        (["--set", "model.path=models/Qwen9"], "Cairn does not know a published model named 'Qwen9'"),
    ],
)
def test_bad_input_is_one_sentence_and_ends_with_2(arguments: list[str], sentence: str, recipe: Path) -> None:
    whole = arguments if arguments[0].endswith(".yaml") else [recipe, *arguments]
    result = plan(*whole)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_config_without_an_architecture_is_one_sentence(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    result = plan(recipe, "--set", f"model.path={folder}")
    assert result.exit_code == 2
    assert "config.json" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_recipe_without_gpus_is_planned_for_the_memory_of_this_machine(tmp_path: Path) -> None:
    architecture("qwen3").save(tmp_path / "model")
    config = tiny_config(tmp_path)
    recipe = written(tmp_path / "tiny.yaml", config)
    result = plan(recipe, "--set", f"model.path={tmp_path / 'model'}", "--json")
    assert result.exit_code == 0
    (memory,) = json.loads(result.stdout)["memory"]
    assert memory["of"] == "a machine's own memory"
    assert {"training: weights", "training: optimizer", "rollout: keys and values"} <= {
        row["what"] for row in memory["rows"]
    }
