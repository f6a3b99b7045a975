"""Configurations of verl and of TRL as recipes, and their tables."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cairn.configs.counterparts import Table, counterparts
from cairn.configs.loader import load, options
from cairn.configs.schema.run import RunConfig
from cairn.flows.importing.opening import recipe_of

NAMES = {option.name for option in options(RunConfig)}
SECTIONS = {name.rpartition(".")[0] for name in NAMES}
MAPPINGS = ("rollout.sglang.", "training.megatron.")


@pytest.mark.parametrize("table", ["megatron", "verl", "trl"])
def test_every_row_of_a_table_names_options_that_there_are_or_a_reason(table: Table) -> None:
    for row in counterparts(table).values():
        inside = {option for option in row.options if option.startswith(MAPPINGS)}
        assert set(row.options) - inside <= NAMES | SECTIONS, row.flag
        assert bool(row.options or row.how) != bool(row.why), row.flag


VERL = """\
set -x
export PYTHONUNBUFFERED=1
MODEL=${MODEL:-Qwen/Qwen3-8B}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/train.parquet \\
    data.val_files="['/data/gsm8k/test.parquet']" \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 \\
    algorithm.use_kl_in_reward=False \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""


def config_of(folder: Path, name: str, text: str) -> tuple[RunConfig, Any]:
    file = folder / name
    file.write_text(text)
    draft = recipe_of(file, {})
    assert draft.problems == []
    recipe = folder / "recipe.yaml"
    recipe.write_text(draft.text("A test."))
    return load(recipe), draft


def test_overrides_of_verl_become_a_recipe(tmp_path: Path) -> None:
    config, draft = config_of(tmp_path, "run.sh", VERL)
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (1024, 5)
    assert (config.training.num_steps_per_rollout, config.global_batch_size) == (4, 1280)
    assert (config.training.engine, config.training.world_size) == ("torch", 8)
    assert (config.training.context_parallel_size, config.training.sequence_packing) == (2, True)
    assert (config.rollout.engine, config.rollout.num_engines) == ("sglang", 4)
    assert config.rollout.sglang == {"mem_fraction_static": 0.6, "attention_backend": "fa3"}
    assert (config.rollout.rollout_max_prompt_len, config.rollout.rollout_max_response_len) == (512, 1024)
    assert (config.algorithm.advantage_estimator, config.algorithm.loss_scale_factor) == ("grpo", 1024)
    assert (config.algorithm.eps_clip, config.algorithm.eps_clip_high) == (0.2, 0.28)
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_loss_type) == (0.001, "low_var_kl")
    assert (config.training.adam_beta2, config.training.weight_decay) == (0.999, 0.01)
    assert (config.rollout.num_epoch, config.eval.eval_interval, config.checkpoint.save_interval) == (15, 5, 20)
    assert [one.temperature for one in config.eval.benchmarks] == [0]
    assert config.tracking.use_wandb
    assert "always on" in draft.left_out["data.filter_overlong_prompts True"]


def test_a_file_of_verl_and_its_overrides_are_one_recipe(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for line in VERL.splitlines():
        name, equals, value = line.strip().removesuffix("\\").strip().removeprefix("+").partition("=")
        if equals and "." in name:
            owner = nested
            *path, last = name.split(".")
            for part in path:
                owner = owner.setdefault(part, {})
            owner[last] = yaml.safe_load(value.strip("'\"").replace("$MODEL", "Qwen/Qwen3-8B").replace(" $@", ""))
    nested["actor_rollout_ref"]["actor"]["optim"]["lr"] = 1e-6
    from_file, _ = config_of(tmp_path, "verl.yaml", yaml.safe_dump(nested))
    from_script, _ = config_of(tmp_path, "run.sh", VERL)
    for section, one in from_file.model_dump().items():
        assert one == from_script.model_dump()[section]


TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "train.parquet",
    "reward_funcs": ["accuracy_reward"],
    "learning_rate": 1e-5,
    "num_generations": 8,
    "max_completion_length": 1024,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "max_steps": 500,
    "beta": 0.001,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "use_vllm": True,
    "use_peft": True,
    "log_completions": True,
}


def test_a_file_of_trl_becomes_a_recipe_and_a_command_line_the_same(tmp_path: Path) -> None:
    config, draft = config_of(tmp_path, "grpo.yaml", yaml.safe_dump(TRL))
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (8, 8)
    assert (config.training.num_steps_per_rollout, config.global_batch_size) == (2, 32)
    assert config.rollout.num_rollout == 250
    assert (config.training.micro_batch_size, config.training.lr, config.training.lr_decay_style) == (8, 1e-5, "linear")
    assert (config.training.lora.r, config.training.lora.lora_alpha) == (16, 32)
    algorithm = config.algorithm
    assert (algorithm.use_kl_loss, algorithm.kl_loss_coef, algorithm.kl_loss_type) == (True, 0.001, "k3")
    assert (algorithm.calculate_per_token_loss, algorithm.grpo_std_normalization) == (True, False)
    assert (algorithm.custom_tis_function_path, algorithm.tis_level, algorithm.tis_mode) == ("mis", "sequence", "mask")
    assert config.reward.rm_type == "math"
    assert "every sample is recorded" in draft.left_out["log_completions True"]
    words = " ".join(f"--{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in TRL.items())
    script = f"accelerate launch --num_processes 4 train_grpo.py {words}"
    launched, _ = config_of(tmp_path, "run.sh", script)
    assert (launched.training.world_size, launched.rollout.rollout_batch_size) == (4, 32)
    one = launched.model_dump(mode="json")
    for section in ("algorithm", "model", "reward"):
        assert one[section] == config.model_dump(mode="json")[section]
