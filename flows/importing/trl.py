"""A recipe from the options of TRL's GRPO trainer, as a command line or as a YAML file."""

from collections.abc import Mapping
from typing import Any

from cairn.flows.importing.draft import Draft, count, mapping_in, typed
from cairn.flows.importing.launch import Launch
from cairn.flows.importing.slime import flags_of

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.999,
    "loss_type": "dapo",
    "num_train_epochs": 3,
    "gradient_checkpointing": True,
    "epsilon": 0.2,
}
"""TRL's defaults that differ from Cairn's, or that make batches."""

GRADERS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "deepscaler"}
"""Graders of Cairn by TRL's names of reward functions."""

CORRECTIONS = {
    "token_truncate": {"custom_tis_function_path": "tis"},
    "token_mask": {"custom_tis_function_path": "icepop"},
    "sequence_truncate": {"custom_tis_function_path": "mis", "tis_level": "sequence", "tis_mode": "truncate"},
    "sequence_mask": {"custom_tis_function_path": "mis", "tis_level": "sequence", "tis_mode": "mask"},
}
"""Corrections by TRL's `vllm_importance_sampling_mode`."""


def is_trl(values: Mapping[str, Any]) -> bool:
    """Whether options are those of TRL's GRPO trainer."""
    own = {"num_generations", "max_completion_length", "num_iterations", "vllm_mode", "reward_funcs"}
    return not own.isdisjoint(values)


def options(launch: Launch) -> dict[str, Any]:
    """Return the options of a command line, over those of the file that `--config` names, and `num_processes`."""
    flags = flags_of(launch.arguments)
    found: dict[str, Any] = {}
    for file in flags.pop("config", []):
        found |= mapping_in(launch.read(file))
    for name, words in {**flags_of(launch.launcher), **flags}.items():
        found[name] = typed("", words)
    for name in ("nproc_per_node", "num_processes"):
        if name in found:
            found["num_processes"] = found.pop(name)
    return found


def recipe_of(given: Mapping[str, Any]) -> Draft:
    """Return the recipe of TRL's options."""
    given = {name: value for name, value in given.items() if value is not None}
    draft, options = Draft(), {**DEFAULTS, **given}
    processes = count(options.pop("num_processes", 1), 1)
    for name in ("config_file", "mixed_precision", "num_machines", "machine_rank", "main_process_port", "standalone"):
        options.pop(name, None)
    draft.set(
        "training.world_size",
        processes,
        "processes of `accelerate launch`"
        if processes > 1
        else "the processes of `accelerate launch`: raise it to your GPUs",
    )
    draft.set("training.num_gpus_per_rank", 1)
    if not {"bf16", "dtype", "torch_dtype"} & given.keys():
        draft.set("training.dtype", "bfloat16", "TRL's default")
    _model(draft, options)
    _engines(draft, options, processes)
    _batches(draft, options, processes)
    _loss(draft, options)
    _reward(draft, options)
    _evaluation(draft, options)
    draft.take_options(options, given, "trl")
    return draft


def _model(draft: Draft, options: dict[str, Any]) -> None:
    name = str(options.pop("model_name_or_path", ""))
    draft.set(
        "model.path",
        name if name.startswith(("/", ".")) else f"models/{name.rpartition('/')[2]}",
        f"hf download {name} --local-dir models/{name.rpartition('/')[2]}",
    )
    data = str(options.pop("dataset_name", ""))
    draft.set("data.path", data, "a file: a JSONL or Parquet file of the data set")
    if options.pop("use_peft", False):
        options.setdefault("lora_r", 16)
        options.setdefault("lora_alpha", 32)
    else:
        for option in ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "use_rslora"):
            options.pop(option, None)


def _engines(draft: Draft, options: dict[str, Any], processes: int) -> None:
    vllm, mode = options.pop("use_vllm", False), options.pop("vllm_mode", "colocate")
    each = count(options.pop("vllm_tensor_parallel_size", 1), 1)
    draft.set("rollout.engine", "sglang" if vllm else "transformers", "TRL's vLLM" if vllm else "TRL's generate")
    draft.set("rollout.dtype", "bfloat16")
    draft.set("rollout.num_gpus_per_engine", each)
    draft.set("rollout.num_engines", max(1, processes // each))
    if not vllm or mode == "colocate":
        draft.set("fleet.colocate", True, "TRL generates on the GPUs of the trainer")
    corrected = options.pop("vllm_importance_sampling_correction", True) and vllm
    mode = options.pop("vllm_importance_sampling_mode", "sequence_mask")
    high = options.pop("vllm_importance_sampling_cap", options.pop("vllm_importance_sampling_clip_max", 3.0))
    if corrected:
        draft.set("algorithm.use_tis", True, "vllm_importance_sampling_correction")
        for option, value in CORRECTIONS.get(str(mode), {}).items():
            draft.set(f"algorithm.{option}", value, f"vllm_importance_sampling_mode {mode}")
        draft.set("algorithm.tis_clip", high)


def _batches(draft: Draft, options: dict[str, Any], processes: int) -> None:
    """Set the batch of an iteration. TRL counts completions of a process; an optimizer step has as many as all of them
    accumulate."""
    each = count(options.pop("per_device_train_batch_size", 8), 8)
    accumulated = count(options.pop("gradient_accumulation_steps", 1), 1)
    samples, step = count(options["num_generations"], 8), each * accumulated * processes
    steps = count(options.pop("steps_per_generation", None), accumulated)
    generated = count(options.pop("generation_batch_size", None), each * processes * steps)
    draft.set("rollout.rollout_batch_size", max(1, generated // samples), f"{generated} completions / {samples}")
    draft.set(
        "training.num_steps_per_rollout",
        max(1, generated // step),
        f"{generated} completions / ({each} × {accumulated} × {processes})",
    )
    draft.set("training.micro_batch_size", each, "per_device_train_batch_size")
    total, epochs = count(options.pop("max_steps", None), 0), options.pop("num_train_epochs")
    if total:
        taken = max(1, generated // step)
        draft.set("rollout.num_rollout", max(1, total // taken), f"max_steps {total} / {taken}")
    else:
        draft.set("rollout.num_epoch", count(epochs, 1), "num_train_epochs")


def _loss(draft: Draft, options: dict[str, Any]) -> None:
    name, level = str(options.pop("loss_type")), options.pop("importance_sampling_level", "token")
    if name in ("dapo", "bnpo", "cispo"):
        draft.set("algorithm.calculate_per_token_loss", True, f"loss_type {name}")
    elif name == "dr_grpo":
        draft.set("algorithm.loss_scale_factor", options["max_completion_length"], "loss_type dr_grpo")
    elif name != "grpo":
        draft.leave_out(f"loss_type={name}", "there is no such loss; algorithm.loss_type takes a function of your own")
    if name == "cispo":
        draft.set("algorithm.loss_type", "cispo")
    elif level == "sequence":
        draft.set("algorithm.loss_type", "gspo", "importance_sampling_level sequence")
    beta = options.pop("beta", 0.0)
    if isinstance(beta, int | float) and beta:
        draft.set("algorithm.use_kl_loss", True, "beta above 0")
        draft.set("algorithm.kl_loss_coef", beta, "beta")
        draft.set("algorithm.kl_loss_type", "k3", "TRL's estimator")
    if options.pop("sync_ref_model", False):
        options.setdefault("ref_model_sync_steps", 512)
    else:
        options.pop("ref_model_sync_steps", None)
    if (threshold := options.pop("off_policy_mask_threshold", None)) is not None:
        draft.set("algorithm.use_opsm", True, "off_policy_mask_threshold")
        draft.set("algorithm.opsm_delta", threshold)
    if options.get("scale_rewards") == "batch":
        draft.leave_out("scale_rewards=batch", "the standard deviation is that of the group")
        options.pop("scale_rewards")


def _reward(draft: Draft, options: dict[str, Any]) -> None:
    names = options.pop("reward_funcs", [])
    names = names if isinstance(names, list) else [names]
    names = [str(name) for name in names]
    known = [GRADERS[name] for name in names if name in GRADERS]
    if known:
        draft.set("reward.rm_type", known[0], f"reward_funcs {' '.join(names)}")
    for name in names:
        if name not in GRADERS:
            draft.leave_out(
                f"reward_funcs {name}", "write a grader: see docs/rewards.md; one grader may return several rewards"
            )
    if "reward_weights" in options:
        draft.leave_out(f"reward_weights={options.pop('reward_weights')}", "one grader adds up its rewards")


_EVALUATION = {"eval_strategy", "eval_steps", "do_eval", "eval_on_start", "dataset_test_split", "num_generations_eval"}


def _evaluation(draft: Draft, options: dict[str, Any]) -> None:
    """Leave evaluations out: they are of a split of the data set, which is a file of its own here."""
    for name in sorted(_EVALUATION & options.keys()):
        draft.leave_out(f"{name}={options.pop(name)}", "a held-out split is a benchmark with a file: eval.benchmarks")
    strategy = options.pop("save_strategy", "steps")
    if strategy != "steps":
        draft.leave_out(f"save_strategy={strategy}", "checkpoint.save_interval counts iterations")
    if "wandb" in str(options.pop("report_to", "")):
        draft.set("tracking.use_wandb", True, "report_to wandb")
