"""Recipes fit the machines that they name; those without GPUs fit small machines."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bench.exchanges import exchange_of
from cairn.configs.catalogue import hardware, published_config
from cairn.configs.loader import load
from cairn.engines.models.quantized import quantization_config
from cairn.flows.plan.memory import engine_memory, rank_memory, weight_bytes
from cairn.flows.plan.planning import plan_of
from cairn.flows.plan.subject import FP8, Plan, subject_of
from tests.architectures import architecture

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "configs" / "recipes"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_without_gpus_fits_a_small_machine(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = load(recipe).model.folders.values()
    small = architecture("qwen3")
    built = replace(small, config={**small.config, "max_position_embeddings": 2048})  # as those of the examples are
    for folder in {Path(folder) for folder in folders}:
        built.save(tmp_path / folder)
    plan = plan_of(subject_of(load(recipe), recipe.stem, "h100", memory_of_this_machine=16e9))
    assert plan.fits
    assert plan.gpus == 0


@cache
def planned(recipe: Path) -> Plan:
    config = load(recipe)
    assert config.fleet.gpu is not None
    return plan_of(subject_of(config, recipe.stem, config.fleet.gpu, memory_of_this_machine=0))


def test_recipes_of_published_models_fit_the_gpus_and_the_machines_that_they_name() -> None:
    recipes = sorted((RECIPES / "models").glob("*.yaml"))
    assert len(recipes) >= 40
    wrong = {}
    for recipe in recipes:
        plan = planned(recipe)
        assert plan.memory[-1].of == "a machine's own memory"
        if not plan.fits or plan.gpus != 8 * plan.machines:
            large = {memory.of: memory.total for memory in plan.memory if not memory.fits}
            wrong[recipe.stem] = (plan.problems, large, plan.machines, plan.gpus)
    assert wrong == {}


def test_no_recipe_needs_more_or_larger_gpus_than_slimes_script_for_the_model() -> None:
    """Where slime's script has the optimizer on the host, a second layout has it there too."""
    slime_script = runpy.run_path(str(ROOT / "docs" / "generate.py"))["slime_script"]
    wrong = {}
    for recipe in sorted((RECIPES / "models").glob("*.yaml")):
        if (found := slime_script(recipe)) is None or recipe.stem.endswith("-offload"):
            continue
        script, needs = found
        layout = recipe.with_stem(f"{recipe.stem}-offload") if needs["offload"] else recipe
        plan = planned(layout)
        on_host = bool(load(layout).training.megatron.get("optimizer_cpu_offload"))
        larger = hardware(plan.gpu).memory > hardware(needs["gpu"]).memory
        if plan.gpus > needs["gpus"] or larger or on_host != needs["offload"]:
            wrong[layout.stem] = f"{plan.gpus} {plan.gpu}, and {script} {needs['gpus']} {needs['gpu']}"
    assert wrong == {}


def test_a_plan_of_a_published_model_imports_neither_pytorch_nor_the_library() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cairn.flows.cli import app;"
        "r = CliRunner().invoke(app, ['plan', 'DeepSeek-V3']);"
        "print(r.exit_code, [m for m in ('torch', 'transformers', 'ray', 'prefect') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "0 []"


@pytest.mark.parametrize("downloaded", [False, True])
def test_a_folder_in_fp8_is_served_in_a_byte_a_weight_but_for_what_stays_wide(downloaded: bool, tmp_path: Path) -> None:
    recipe = RECIPES / "models" / "DeepSeek-R1.yaml"
    config = load(recipe)
    if downloaded:
        (tmp_path / "config.json").write_text(json.dumps(published_config("DeepSeek-R1")))
        config = load(recipe, [f"model.path={tmp_path}"])
    subject = subject_of(config, recipe.stem, "h200", memory_of_this_machine=64e9)
    wide = 2 * 129280 * 7168 + 58 * 256 * 7168  # embedding and output layer, routers
    assert weight_bytes(subject) * subject.model.parameters == pytest.approx(671.026e9 + wide, rel=1e-4)


def test_servers_of_a_folder_in_fp8_take_half_of_what_training_has_and_are_sent_half(tmp_path: Path) -> None:
    recipe = RECIPES / "models" / "Qwen3-30B-A3B.yaml"
    (tmp_path / "config.json").write_text(
        json.dumps((published_config("Qwen3-30B-A3B") or {}) | {"quantization_config": FP8})
    )
    plain, *in_fp8 = (
        subject_of(load(recipe, options), recipe.stem, "h100", memory_of_this_machine=64e9)
        for options in ([], ["rollout.model_path=Qwen3-30B-A3B-FP8"], [f"rollout.model_path={tmp_path}"])
    )
    wide = 2 * 151936 * 2048 + 48 * 128 * 2048  # embedding and output layer, routers
    for subject in in_fp8:
        size = weight_bytes(subject) * plain.model.parameters
        assert size == pytest.approx(30.532e9 + wide, rel=1e-4)
        saved = engine_memory(subject).pool - engine_memory(plain).pool
        assert saved == pytest.approx((2 * 30.532e9 - size) / 8, rel=0.02)  # of a GPU of 8, with its copy of the norms
        assert rank_memory(subject, 0) == rank_memory(plain, 0)
        scheme = quantization_config(FP8)
        cost = exchange_of(subject.model, subject.config.training, 1 << 29, scheme)
        assert cost.sent == pytest.approx(size, rel=1e-3)
        assert (
            cost.nbytes == exchange_of(plain.model, plain.config.training, 1 << 29).sent == 2 * plain.model.parameters
        )


def test_the_servers_own_folder_says_what_their_ranks_cannot_divide(tmp_path: Path) -> None:
    recipe = RECIPES / "models" / "Qwen3-30B-A3B.yaml"
    stored = published_config("Qwen3-30B-A3B") or {}
    for name, quantization in (("plain", {}), ("fp8", {"quantization_config": FP8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(stored | quantization))
    cut = "expert's width of 768, in FP8 blocks of 128, cannot be cut over 8 ranks of a rollout engine"
    other = "whose weights have other names or shapes than those of"
    cases = [
        (["rollout.model_path=Qwen3-30B-A3B-FP8"], cut),
        (["rollout.model_path=Qwen3-30B-A3B-FP8", "rollout.sglang.ep_size=8"], None),
        ([f"model.path={tmp_path}/fp8"], cut),
        ([f"model.path={tmp_path}/fp8", f"rollout.model_path={tmp_path}/plain"], None),
        (["rollout.model_path=Qwen3-4B"], other),
    ]
    wrong = []
    for options, sentence in cases:
        problems = plan_of(subject_of(load(recipe, options), recipe.stem, "h100", memory_of_this_machine=64e9)).problems
        if [*map(bool, problems)] != [True] * bool(sentence) or (sentence and sentence not in problems[0]):
            wrong.append((options, problems))
    assert not wrong
