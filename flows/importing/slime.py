"""A recipe from the flags of slime's `train.py` and `train_async.py`, which are slime's, Megatron's and SGLang's."""

import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from cairn.configs.catalogue import published_repository
from cairn.configs.counterparts import counterparts
from cairn.configs.kinds import OPTIONS
from cairn.configs.plugins import RELATIVE_IMPORT, BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.training.megatron.permitted import PERMITTED
from cairn.flows.importing.draft import Draft, count, mapping, mapping_in, typed, written
from cairn.flows.importing.launch import Launch
from cairn.tasks.grading.graders import get_grader

Flags = dict[str, list[str]]


def flags_of(arguments: Sequence[str]) -> Flags:
    """Return the flags of a command line with their values, by their names without dashes: `rm_type`. The last one
    counts where a flag is repeated."""
    flags: Flags = {}
    name = None
    for word in arguments:
        if re.match(r"--[A-Za-z]", word):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name is not None:
            flags[name].append(word)
    return flags


def recipe_of(launch: Launch) -> Draft:
    """Return the recipe of a launch of slime."""
    draft, flags = Draft(), flags_of(launch.arguments)
    _engines(draft, flags)
    _machines(draft, flags)
    _models(draft, flags)
    _pipeline(draft, flags, launch)
    _batches(draft, flags)
    _micro_batches(draft, flags)
    _benchmarks(draft, flags, launch)
    _code(draft, flags, launch)
    _others(draft, flags)
    _complete(draft)
    return draft


def _engines(draft: Draft, flags: Flags) -> None:
    backend = (flags.pop("train_backend", None) or ["megatron"])[0]
    draft.set("rollout.engine", "sglang", "slime's")
    draft.set("rollout.dtype", "bfloat16", "slime's")
    draft.set("training.engine", "torch" if backend == "fsdp" else backend, "slime's --train-backend")
    draft.set("training.dtype", "bfloat16", "slime's")
    draft.set("training.num_gpus_per_rank", 1)
    if backend == "megatron":
        draft.set("training.megatron.use_distributed_optimizer", True, "slime's")
    elif "multimodal_keys" not in flags:
        draft.set("training.sequence_packing", True, "slime's")


def _machines(draft: Draft, flags: Flags) -> None:
    nodes, gpus = _number(flags, "actor_num_nodes", 1), _number(flags, "actor_num_gpus_per_node", 8)
    colocate, each = "colocate" in flags, _number(flags, "rollout_num_gpus_per_engine", 1)
    total = nodes * gpus
    draft.set("training.world_size", total, f"--actor-num-nodes {nodes} × --actor-num-gpus-per-node {gpus}")
    machine = _number(flags, "num_gpus_per_node", 8)
    if colocate and each > machine:
        draft.set(
            "rollout.num_gpus_per_engine",
            machine,
            f"{each} in slime; an engine that shares its GPUs with training fits on one machine",
        )
        for name in ("dp", "ep", "tp"):
            if _number(flags, f"sglang_{name}_size", 1) > machine:
                flags[f"sglang_{name}_size"] = [str(machine)]
        each = machine
    else:
        draft.set("rollout.num_gpus_per_engine", each)
        if each > machine:
            draft.set("fleet.update_weight_transport", "distributed", "an engine is on several machines")
    if "rollout_external_engine_addrs" in flags:
        servers = flags.pop("rollout_external_engine_addrs")
        urls = [url if "://" in url else f"http://{url}" for url in servers]
        draft.set("rollout.external_urls", urls)
        draft.set("rollout.num_engines", len(urls))
        draft.values.pop("rollout.num_gpus_per_engine")
    else:
        sampling = total if colocate else _number(flags, "rollout_num_gpus", total)
        of = "all of these GPUs" if colocate else f"--rollout-num-gpus {sampling}"
        draft.set("rollout.num_engines", max(1, sampling // each), f"{of} / {each}")
    flags.pop("rollout_num_gpus", None)
    if colocate:
        draft.set("fleet.colocate", True)
        flags.pop("colocate")
    if nodes > 1:
        draft.set("fleet.ray_address", "auto", "the cluster of `ray start`")


def _models(draft: Draft, flags: Flags) -> None:
    path = (flags.pop("hf_checkpoint", None) or [""])[0].rstrip("/")
    own = (flags.pop("ref_load", None) or [""])[0]
    trained = own.rstrip("/").removesuffix("_torch_dist")
    if Path(path).name.lower() == f"{Path(trained).name}-fp8".lower():
        draft.set("rollout.model_path", path, "--hf-checkpoint; training begins with the weights of --ref-load")
        path = trained
    repository = published_repository(Path(path).name)
    draft.set("model.path", path, f"hf download {repository}" if repository else "")
    if own:
        draft.leave_out(
            written("--ref-load", [own]),
            "the initial weights, of the policy and of the reference, are those of model.path; weights of their own in "
            "Megatron's format become a folder by `cairn convert`",
        )


def _pipeline(draft: Draft, flags: Flags, launch: Launch) -> None:
    rollout = (flags.get("rollout_function_path") or [""])[0]
    samples = (flags.get("loss_type") or [""])[0] != "sft_loss"
    if "sft_rollout" in rollout or "fully_async" in rollout:
        flags.pop("rollout_function_path")
        draft.leave_out(
            written("--rollout-function-path", [rollout]),
            "rollout.pipeline is this" if samples else "algorithm.loss_type=sft_loss trains on the rows as they are",
        )
    if not samples or (launch.program != "train_async.py" and "fully_async" not in rollout):
        return
    streaming = "fully_async" in rollout
    draft.set(
        "rollout.pipeline",
        "streaming" if streaming else "lagged",
        "fully_async_rollout" if streaming else "train_async.py",
    )
    if streaming and (interval := _number(flags, "update_weights_interval", 1)) > 1:
        draft.set("rollout.update_weights_interval", interval)
        draft.set("rollout.max_age", interval, "at least the interval")
    if not {"use_tis", "use_rollout_logprobs"} & flags.keys():
        draft.set(
            "algorithm.use_tis", True, "added: tokens of older weights need a correction; slime has none by default"
        )


def _batches(draft: Draft, flags: Flags) -> None:
    """Set the batch of an iteration. slime's prompts × samples are the samples of its optimizer steps."""
    prompts, samples = _number(flags, "rollout_batch_size", 0), _number(flags, "n_samples_per_prompt", 1)
    if prompts:
        draft.set("rollout.rollout_batch_size", prompts)
    draft.set("rollout.n_samples_per_prompt", samples)
    if (flags.get("loss_type") or [""])[0] == "sft_loss":
        samples = 1
    if "global_batch_size" in flags:
        size, steps = _number(flags, "global_batch_size", 1), _number(flags, "num_steps_per_rollout", 0)
        if prompts * samples % size == 0:
            steps = prompts * samples // size
            draft.set(
                "training.num_steps_per_rollout", steps, f"{prompts} × {samples} samples / --global-batch-size {size}"
            )
        else:
            draft.set("training.global_batch_size", size)
            draft.set("training.num_steps_per_rollout", steps or 1)


def _micro_batches(draft: Draft, flags: Flags) -> None:
    """Set the size of a micro-batch: slime reads `--max-tokens-per-gpu` with `--use-dynamic-batch-size` alone."""
    if "use_dynamic_batch_size" in flags and "max_tokens_per_gpu" in flags:
        flags.pop("use_dynamic_batch_size")
        if "micro_batch_size" in flags:
            draft.leave_out(
                written("--micro-batch-size", flags.pop("micro_batch_size")),
                "training.max_tokens_per_gpu sets the micro-batches",
            )
    elif "max_tokens_per_gpu" in flags:
        draft.leave_out(
            written("--max-tokens-per-gpu", flags.pop("max_tokens_per_gpu")),
            "slime reads it with --use-dynamic-batch-size alone",
        )


def _benchmarks(draft: Draft, flags: Flags, launch: Launch) -> None:
    """Set the evaluations: pairs of name and path, or those of a YAML file."""
    common = {
        "input_key": flags.pop("eval_input_key", None) or flags.get("input_key"),
        "label_key": flags.pop("eval_label_key", None) or flags.get("label_key"),
        "tool_key": flags.pop("eval_tool_key", None) or flags.get("tool_key"),
        "n_samples_per_eval_prompt": flags.pop("n_samples_per_eval_prompt", None),
        "temperature": flags.pop("eval_temperature", None) or flags.get("rollout_temperature"),
        "top_p": flags.pop("eval_top_p", None) or flags.get("rollout_top_p"),
        "top_k": flags.pop("eval_top_k", None) or flags.get("rollout_top_k"),
        "max_response_len": flags.pop("eval_max_response_len", None) or flags.get("rollout_max_response_len"),
    }
    if "apply_chat_template" not in flags:
        common["apply_chat_template"] = ["false"]
    defaults = {name: typed(f"eval.benchmarks.{name}", words) for name, words in common.items() if words}
    pairs = flags.pop("eval_prompt_data", [])
    named = zip(pairs[::2], pairs[1::2], strict=False)
    found: list[dict[str, Any]] = [{"name": name, "path": path} for name, path in named]
    if "eval_config" in flags:
        file = (flags.pop("eval_config") or [""])[0]
        found += _eval_config(draft, file, launch.read(file))
    for one in [*found]:
        if "rm_type" in one and not _is_grader(str(one["rm_type"])):
            draft.leave_out(f"benchmark {one['name']}", f"there is no grader {one['rm_type']!r}")
            found.remove(one)
    if found:
        draft.set("eval.benchmarks", [{**one, **{k: v for k, v in defaults.items() if k not in one}} for one in found])
    elif "eval_interval" in flags:
        draft.leave_out(written("--eval-interval", flags.pop("eval_interval")), "there is nothing to evaluate")
    if not found:
        flags.pop("skip_eval_before_train", None)


def _is_grader(name: str) -> bool:
    try:
        get_grader(RewardConfig(rm_type=name))
    except BadPlugin:
        return False
    return True


def _eval_config(draft: Draft, file: str, text: str | None) -> Iterator[dict[str, Any]]:
    """Yield the data sets in a file of `--eval-config`."""
    values = mapping(mapping_in(text).get("eval"))
    datasets = values.get("datasets")
    if not isinstance(datasets, list):
        draft.leave_out(f"--eval-config {file}", "the file is not there, or is not of slime's form")
        return
    for one in map(mapping, datasets):
        if not {"name", "path"} <= one.keys():
            continue
        merged = {**mapping(values.get("defaults")), **one}
        for name in sorted(merged.keys() - BenchmarkConfig.model_fields.keys()):
            del merged[name]
            draft.leave_out(f"{name} of --eval-config", "benchmarks have no such option")
        yield {"name": merged.pop("name"), "path": merged.pop("path"), **merged}


def _code(draft: Draft, flags: Flags, launch: Launch) -> None:
    """Turn names of functions, `package.function`, into `file.py:function` where the job would find the file."""
    names = {row.attribute for row in counterparts().values() if {*row.options} & {*OPTIONS}}
    for flag in sorted(names & flags.keys()):
        name = (flags[flag] or [""])[0]
        if (why := _OWN_FUNCTIONS.get(name.rpartition(".")[0])) is not None:
            draft.leave_out(written("--" + flag.replace("_", "-"), flags.pop(flag)), why)
        elif name.endswith("mis.compute_mis_weights_with_cp"):
            draft.set("algorithm.custom_tis_function_path", "mis", flags.pop(flag)[0])
            _mis(draft, flags, launch)
        elif name:
            flags[flag] = [_local_code(draft, name, launch.folders)]
    _distillation(draft, flags)


_MIS = {"tis_lower_bound": "tis_clip_low", "tis_upper_bound": "tis_clip"}


def _mis(draft: Draft, flags: Flags, launch: Launch) -> None:
    """Set the options of slime's example of a correction, which `--custom-config-path` names."""
    file = (flags.pop("custom_config_path", None) or [""])[0]
    for name, value in mapping_in(launch.read(file)).items():
        option = f"algorithm.{_MIS.get(name, name)}"
        if value is not None and option.rpartition(".")[2] in AlgorithmConfig.model_fields:
            draft.set(option, value, f"{name} in {file}")


def _distillation(draft: Draft, flags: Flags) -> None:
    """Set the teacher of on-policy distillation."""
    kind = (flags.pop("opd_type", None) or [""])[0]
    if kind == "sglang" and "rm_url" in flags:
        url = " ".join(flags.pop("rm_url")).removesuffix("/generate")
        draft.set("model.teacher_url", url, "--rm-url")
        draft.set("model.teacher_name", "teacher", "its name at /v1/models of the server")
    elif "opd_teacher_load" in flags:
        path = " ".join(flags.pop("opd_teacher_load"))
        draft.set("model.teacher_path", path.removesuffix("_torch_dist"), "a folder, where slime has Megatron's format")


_OWN_FUNCTIONS = {
    "slime.rollout.on_policy_distillation": "algorithm.use_opd is this; a grader's reward counts besides",
    "slime.rollout.sglang_rollout": "the rollout of one response to a prompt is the default",
}
"""What stands for slime's own functions, by their modules."""


def _local_code(draft: Draft, name: str, folders: Sequence[Path]) -> str:
    if match := re.fullmatch(r"slime\.rollout\.filter_hub\.\w+\.(\w+)", name):
        return match[1]
    module, dot, function = name.replace(":", ".").rpartition(".")
    if not dot or name.endswith(".py") or ".py:" in name:
        return name
    for folder in folders:
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        if isfile(file) and RELATIVE_IMPORT.search(file.read_text("utf-8", "replace")):
            draft.notes.append(f"{name} imports from its own package: run with PYTHONPATH={folder}")
            return name
        if isfile(file):
            return f"{file}:{function}"
    return name


def _others(draft: Draft, flags: Flags) -> None:
    """Set every option whose flag has a plain counterpart, and leave out the others."""
    ours, megatron = counterparts(), counterparts("megatron")
    uses_megatron = draft.values["training.engine"] == "megatron"
    for name, words in flags.items():
        flag = "--" + name.replace("_", "-")
        row = ours.get(name) or megatron.get(name)
        if name.startswith("sglang_") and name not in ours:
            draft.set(f"rollout.sglang.{name.removeprefix('sglang_')}", typed("rollout.sglang.x", words))
        elif name.startswith("router_") and name not in ours:
            draft.set(f"rollout.router.{name.removeprefix('router_')}", typed("rollout.router.x", words))
        elif name == "recompute_activations" and uses_megatron:
            draft.set("training.megatron.recompute_granularity", "selective", "--recompute-activations")
        elif name in _OF_FSDP and not uses_megatron:
            draft.set(f"training.{name}", typed(f"training.{name}", words))
        elif row is not None and row.attribute in _COMPUTED:
            continue
        elif row is not None:
            draft.take(row, words)
        elif name in PERMITTED and uses_megatron:
            draft.set(f"training.megatron.{name}", typed("training.megatron.x", words))
        else:
            draft.leave_out(written(flag, words), "neither slime's nor Megatron's flag is known here")


_OF_FSDP = ("context_parallel_size", "fsdp_cpu_offload", "gradient_checkpointing")
"""Flags of slime's FSDP backend, of the versions that have one, that are named as the options here."""
_COMPUTED = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_steps_per_rollout")


def _complete(draft: Draft) -> None:
    """Set what follows from other options, and drop what Megatron's defaults are."""
    values = draft.values
    if "data.apply_chat_template" not in values:
        draft.set("data.apply_chat_template", False, "slime's default")
    if "data.rollout_shuffle" not in values:
        draft.set("data.rollout_shuffle", False, "slime's default")
    if "algorithm.eps_clip" not in values:
        draft.set("algorithm.eps_clip", 0.2, "slime's default")
    for name, value in [*values.items()]:
        if value == 1 and re.fullmatch(r"training(\.megatron)?\.(\w+_model|context)_parallel_size", name):
            del values[name]  # the default
    alone = values.get("training.megatron.tensor_model_parallel_size", 1) == 1
    if alone and values.pop("training.megatron.sequence_parallel", None):
        draft.leave_out("--sequence-parallel", "no effect without tensor parallelism")
    if not values.get("training.megatron.optimizer_cpu_offload"):
        for name in ("overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction", "use_precision_aware_optimizer"):
            if values.pop(f"training.megatron.{name}", None):
                draft.leave_out(f"--{name.replace('_', '-')}", "no effect without `--optimizer-cpu-offload`")
    if "training.megatron.expert_model_parallel_size" not in values and alone:
        values.pop("training.megatron.expert_tensor_parallel_size", None)


def _number(flags: Mapping[str, list[str]], name: str, default: int) -> int:
    return count((flags.get(name) or [""])[0], default)
