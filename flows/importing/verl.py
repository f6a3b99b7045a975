"""A recipe from the options of verl's PPO trainer, as hydra's overrides or as a YAML file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cairn.configs.counterparts import counterparts
from cairn.configs.yaml_file import parse_yaml
from cairn.engines.training.megatron.permitted import PERMITTED
from cairn.flows.importing.draft import Draft, count

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "trainer.total_epochs": 30,
}
"""verl's defaults that differ from Cairn's."""


def is_verl(values: Mapping[str, Any]) -> bool:
    """Whether a YAML file is a configuration of verl."""
    return "actor_rollout_ref" in values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options by their dotted names. Options that refer to another one are left out: `${…}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "apply_chat_template_kwargs":
            found |= flat(value, f"{prefix}{key}.")
        elif not (isinstance(value, str) and "${" in value) and value is not None and key != "_target_":
            found[f"{prefix}{key}"] = value
    return found


def overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that hydra's overrides set, by their dotted names."""
    found: dict[str, Any] = {}
    for word in arguments:
        match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
        if match:
            try:
                found[match[1]] = parse_yaml(match[2])
            except yaml.YAMLError:
                found[match[1]] = match[2]
        elif word.startswith("--config-name=") and "megatron" in word:
            found[f"{ACTOR}.strategy"] = "megatron"
    return found


def recipe_of(given: Mapping[str, Any]) -> Draft:
    """Return the recipe of verl's options."""
    given = {name: value for name, value in given.items() if value is not None}
    draft, options = Draft(), {**DEFAULTS, **given}
    megatron = str(options.get(f"{ACTOR}.strategy", "")) == "megatron" or any(
        name.startswith(f"{ACTOR}.megatron.") for name in given
    )
    _engines(draft, options, megatron)
    _batches(draft, options)
    _lengths(draft, options)
    _schedule(draft, options)
    _data(draft, options)
    _reward(draft, options)
    _algorithm(draft, options)
    _others(draft, options, given, megatron)
    if draft.values.get("training.megatron.tensor_model_parallel_size", 1) > 1:
        draft.set("training.megatron.sequence_parallel", True, "verl's, with tensor parallelism")
    return draft


def _engines(draft: Draft, options: dict[str, Any], megatron: bool) -> None:
    nodes, gpus = count(options.pop("trainer.nnodes", 1), 1), count(options.pop("trainer.n_gpus_per_node", 8), 8)
    each, total = count(options.pop(f"{ROLLOUT}.tensor_model_parallel_size"), 1), nodes * gpus
    options.pop(f"{ACTOR}.strategy", None)
    name = options.pop(f"{ROLLOUT}.name", "vllm")
    draft.set("rollout.engine", "transformers" if name == "hf" else "sglang", f"verl's {name}")
    draft.set("rollout.dtype", str(options.pop(f"{ROLLOUT}.dtype", "bfloat16")))
    draft.set("rollout.num_gpus_per_engine", each, "tensor_model_parallel_size of the rollout")
    draft.set("rollout.num_engines", max(1, total // each), f"{nodes} × {gpus} GPUs / {each}")
    draft.set("training.engine", "megatron" if megatron else "torch", "verl's strategy")
    draft.set("training.dtype", "bfloat16")
    options.pop(f"{ACTOR}.fsdp_config.model_dtype", None)
    draft.set("training.world_size", total, f"trainer.nnodes {nodes} × trainer.n_gpus_per_node {gpus}")
    draft.set("training.num_gpus_per_rank", 1)
    if megatron:
        draft.set("training.megatron.use_distributed_optimizer", True, "verl's")
    if options.pop("actor_rollout_ref.hybrid_engine", True):
        draft.set("fleet.colocate", True, "verl's hybrid engine")
    if nodes > 1:
        draft.set("fleet.ray_address", "auto", "the cluster of `ray start`")
    offloads = [name for name in options if re.match(rf"{ACTOR}\.\w+\.(param|optimizer|grad)_offload$", name)]
    if True in [options.pop(name) for name in offloads]:
        draft.set("fleet.offload_train", True, "verl's param_offload and optimizer_offload")


def _batches(draft: Draft, options: dict[str, Any]) -> None:
    prompts = count(options.pop("data.train_batch_size"), 1024)
    mini = count(options.pop(f"{ACTOR}.ppo_mini_batch_size"), prompts)
    draft.set("rollout.rollout_batch_size", prompts, "data.train_batch_size")
    draft.set("training.num_steps_per_rollout", max(1, prompts // mini), f"{prompts} / ppo_mini_batch_size {mini}")
    if options.pop(f"{ACTOR}.use_dynamic_bsz", False):
        for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
            options.pop(f"{ACTOR}.{name}", None)
        options.setdefault(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    else:
        options.pop(f"{ACTOR}.ppo_max_token_len_per_gpu", None)


def _lengths(draft: Draft, options: dict[str, Any]) -> None:
    steps, epochs = options.pop("trainer.total_training_steps", None), options.pop("trainer.total_epochs")
    if count(steps, 0):
        draft.set("rollout.num_rollout", steps, "trainer.total_training_steps")
        draft.leave_out(f"trainer.total_epochs={epochs}", "trainer.total_training_steps is set")
    else:
        draft.set("rollout.num_epoch", count(epochs, 1), "trainer.total_epochs")
    intervals = {"trainer.save_freq": "checkpoint.save_interval", "trainer.test_freq": "eval.eval_interval"}
    for name, option in intervals.items():
        if (frequency := count(options.pop(name, 0), 0)) > 0:
            draft.set(option, frequency, name)

    if "wandb" in str(options.pop("trainer.logger", "")):
        draft.set("tracking.use_wandb", True, "trainer.logger")
    else:
        options.pop("trainer.project_name", None)


def _schedule(draft: Draft, options: dict[str, Any]) -> None:
    steps, share = (options.pop(f"{ACTOR}.optim.lr_warmup_steps{suffix}", 0) for suffix in ("", "_ratio"))
    if count(steps, 0) > 0:
        draft.set("training.lr_warmup_iters", steps, "lr_warmup_steps")
    elif share and isinstance(share, float):
        draft.set("training.lr_warmup_fraction", share, "lr_warmup_steps_ratio")
    betas = options.pop(f"{ACTOR}.optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.set("training.adam_beta1", betas[0])
        draft.set("training.adam_beta2", betas[1], "verl's betas")


def _data(draft: Draft, options: dict[str, Any]) -> None:
    files, held_out = options.pop("data.train_files", ""), options.pop("data.val_files", None)
    images = options.pop("data.image_key", None)
    files = files if isinstance(files, list) else [files]
    if len(files) == 1:
        draft.set("data.path", str(files[0]), "data.train_files")
    else:
        names = [re.sub(r"[^A-Za-z0-9_-]+", "-", str(file)).strip("-") for file in files]
        draft.set(
            "data.mixture", [{"name": n, "path": str(f)} for n, f in zip(names, files, strict=True)], "data.train_files"
        )
    if images:
        options.pop("actor_rollout_ref.model.use_remove_padding", None)  # samples with images are padded
        draft.set("data.multimodal_keys", {"image": images})
    draft.notes.append(
        "verl's rows hold the answer in reward_model.ground_truth: write it into a column of its own, data.label_key"
    )
    if held_out not in (None, "", []) and "eval.eval_interval" in draft.values:
        defaults = {"temperature": 0, "top_p": 1.0, "top_k": -1, "n": 1}
        sampling = {name: options.pop(f"{ROLLOUT}.val_kwargs.{name}", value) for name, value in defaults.items()}
        sampling["n_samples_per_eval_prompt"] = sampling.pop("n")
        sampling = {"max_response_len": options["data.max_response_length"], **sampling}
        rows = [str(row) for row in (held_out if isinstance(held_out, list) else [held_out]) if row]
        names = [Path(row).parent.name or f"val{number}" for number, row in enumerate(rows)]
        benchmarks = [{"name": name, "path": row, **sampling} for name, row in zip(names, rows, strict=True)]
        draft.set("eval.benchmarks", benchmarks, "data.val_files")
        options.pop(f"{ROLLOUT}.val_kwargs.do_sample", None)
    elif "eval.eval_interval" in draft.values:
        del draft.values["eval.eval_interval"]
    if options.pop("trainer.val_before_train", True) is False and "eval.eval_interval" in draft.values:
        draft.set("eval.skip_eval_before_train", True, "trainer.val_before_train=false")


def _reward(draft: Draft, options: dict[str, Any]) -> None:
    path, name = options.pop("custom_reward_function.path", None), options.pop("custom_reward_function.name", None)
    if path:
        draft.set("reward.custom_rm_path", f"{path}:{name or 'compute_score'}", "custom_reward_function")
        draft.notes.append(
            "verl calls (data_source, solution_str, ground_truth, extra_info); a grader here takes "
            "(prompt, response, label, metadata): see docs/rewards.md"
        )
    elif not options.get("reward_model.enable"):
        draft.set(
            "reward.rm_type",
            str(options.pop("reward_model.reward_manager", "math")).replace("naive", "math"),
            "verl chooses by data_source; see docs/rewards.md",
        )
    options.pop("reward_model.reward_manager", None)


def _algorithm(draft: Draft, options: dict[str, Any]) -> None:
    coefficient = options.pop("algorithm.kl_ctrl.kl_coef", 0.001)
    if options.pop("algorithm.use_kl_in_reward", False):
        draft.set("algorithm.kl_coef", coefficient, "algorithm.kl_ctrl.kl_coef")
    else:
        options.pop("algorithm.kl_penalty", None)
    if options.get(f"{ACTOR}.use_kl_loss"):
        options.setdefault(f"{ACTOR}.kl_loss_coef", 0.001)
        options.setdefault(f"{ACTOR}.kl_loss_type", "low_var_kl")
    low, high = options.pop(f"{ACTOR}.clip_ratio_low", None), options.pop(f"{ACTOR}.clip_ratio_high", None)
    both = options.pop(f"{ACTOR}.clip_ratio")
    draft.set("algorithm.eps_clip", both if low is None else low, "clip_ratio")
    if high is not None:
        draft.set("algorithm.eps_clip_high", high, "clip_ratio_high")
    if options[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm":
        options.pop(f"{ACTOR}.loss_agg_mode")
        draft.set(
            "algorithm.loss_scale_factor",
            options.pop(f"{ACTOR}.loss_scale_factor", None) or options["data.max_response_length"],
            "loss_agg_mode seq-mean-token-sum-norm",
        )
    if str(options["algorithm.adv_estimator"]).startswith("reinforce_plus_plus"):
        draft.set("algorithm.normalize_advantages", True, "as verl's estimator")
    kind = options.pop("algorithm.rollout_correction.rollout_is", None)
    if kind:
        draft.set("algorithm.use_tis", True, "rollout_correction.rollout_is")
        if kind == "sequence":
            draft.set("algorithm.custom_tis_function_path", "mis")
            draft.set("algorithm.tis_level", "sequence")


def _others(draft: Draft, options: Mapping[str, Any], given: Mapping[str, Any], megatron: bool) -> None:
    rest = {}
    for name, value in options.items():
        part = name.removeprefix(f"{ACTOR}.megatron.")
        if megatron and part in PERMITTED and name not in counterparts("verl"):
            draft.set(f"training.megatron.{part}", value)
        elif name.startswith(f"{ROLLOUT}.engine_kwargs.sglang."):
            draft.set(f"rollout.sglang.{name.rpartition('.')[2]}", value)
        else:
            rest[name] = value
    draft.take_options(rest, given, "verl", _near)


def _near(name: str) -> str:
    if name.startswith("critic."):
        return "the critic has the actor's options, and those of training.critic"
    if name.startswith(("actor_rollout_ref.ref.", "reward_model.", "global_profiler.", "ray_kwargs.")):
        return "follows from other options here, or has no counterpart"
    return "no counterpart is known here"
