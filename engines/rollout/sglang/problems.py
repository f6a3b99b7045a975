"""Checks of the configuration before anything starts: sentences on what SGLang cannot do, or does differently."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.engines.models.configs import sees_images
from cairn.engines.models.folders import check_model_folder, end_tokens, open_weights, parameter_names
from cairn.engines.models.quantized import BlockFp8, quantization_of
from cairn.engines.rollout.plan import served_model
from cairn.engines.rollout.sglang.completions import routes_problems, support_problems, version_problems
from cairn.engines.rollout.sglang.installation import Installation, SGLangMissing, option_problems, router_problems
from cairn.engines.rollout.sglang.launch import code_problem
from cairn.engines.rollout.sglang.launch_plan import plan_problems, server_options, without_gpu
from cairn.engines.types.errors import BadModel

# Models that SGLang's servers do not serve without a GPU, and why: determined by `python -m tests.sglang_architectures`
# for the version for which `cpu/` is made.


_LATENT = "its attention for CPUs looks for whole keys and values in a cache of latents"
_SPARSE = "its sparse attention asks for the properties of a CUDA device"
_GATED = "its model needs sgl_kernel's fused_sigmoid_mul_cpu"

UNSERVED = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _SPARSE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "its rotary embedding for CPUs takes YaRN alone, which layers with only a window do not have",
    "qwen2_moe": "its shared experts need a Triton kernel, fused_gate_sigmoid_mul_add",
    "qwen3_next": "its linear attention needs sgl_kernel.mamba",
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "minimax_m2": "the norm of its queries and keys is a kernel for CUDA",
    "gpt_oss": "it has attention with sinks for GPUs and CPUs with AMX only",
}
"""Reason, by model type."""


def quantized_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on servers that read quantised weights, and receive new weights in the same format
    (`cairn.engines.weights.fp8`)."""
    rollout, fleet, path = config.rollout, config.fleet, served_model(config)[0]
    servers = server_options(rollout)
    if path != config.model.path:
        yield from _variant_problems("rollout.model_path", path, config.model.path)
    try:
        scheme = quantization_of(Path(path))
    except (BadModel, OSError, ValueError):  # reported where folders are checked
        return
    if any(options.get("quantization") for options in servers):
        yield (
            "rollout.sglang.quantization rounds weights only when a server starts, and updates would not be rounded: "
            "leave it out, and for rollouts in FP8 set a rollout.model_path whose config.json has fp8 in blocks"
        )
    if scheme is None:
        return
    if not isinstance(scheme, BlockFp8):
        yield (
            f"servers of rollout.engine=sglang would hold {path} in four bits, in which no weights are sent, since "
            "training does not round like that: use a folder in bfloat16 or FP8, or set rollout.engine to "
            "transformers, which computes with dequantised weights"
        )
        return
    if not rollout.num_gpus_per_engine and not rollout.external_urls:
        yield (
            f"{path} is in FP8, for which SGLang has no kernels without a GPU: set rollout.num_gpus_per_engine, or "
            "rollout.engine to transformers, which computes with dequantised weights"
        )
    if rollout.dtype != "bfloat16":
        yield f"{path} is in FP8, with which SGLang computes only in bfloat16: set rollout.dtype to bfloat16"
    if fleet.update_weight_transport in ("disk", "store"):
        yield (
            f"fleet.update_weight_transport is {fleet.update_weight_transport}, but servers that hold {path} in FP8 "
            "would read unquantised weights: set it to tensor or distributed"
        )
    if fleet.check_weight_update_equal:
        yield (
            "fleet.check_weight_update_equal allows log-probs to differ only by rounding to bfloat16, but servers "
            f"hold {path} in FP8: leave it out"
        )


MOST_STOP_STRINGS = 32
"""Most stop strings of a request (`MAX_STOP_COUNT` in SGLang's sampling parameters)."""


def problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on servers, router and model."""
    rollout = config.rollout
    yield from plan_problems(rollout)
    yield from support_problems(rollout)
    if config.algorithm.use_rollout_routing_replay:
        yield from routes_problems(rollout)
    if (count := len(rollout.rollout_stop)) > MOST_STOP_STRINGS:
        yield f"rollout.rollout_stop has {count} strings, but SGLang accepts at most {MOST_STOP_STRINGS}: set fewer"
    yield from _draft_problems(config)
    yield from quantized_problems(config)
    yield from _served_otherwise(config.model.path)
    if without_gpu(rollout):
        yield from _unserved(config.model.path)
    if rollout.external_urls and rollout.router is None:  # nothing is launched here
        return
    try:
        installation = Installation.find()
        yield from version_problems(rollout, installation)
        yield from _code_of_the_model(config)
        yield from option_problems(installation, "rollout.sglang", rollout.sglang)
        for index, group in enumerate(rollout.server_groups):
            yield from option_problems(installation, f"rollout.server_groups.{index}.overrides", group.overrides)
        yield from router_problems(installation, rollout.router or {})
    except SGLangMissing as error:
        yield f"rollout.engine: {error}"


def _draft_problems(config: RunConfig) -> Iterator[str]:
    """Yield sentences on layers that draft tokens, which are neither trained nor sent in updates."""
    backups = ("enable_weights_cpu_backup", "enable_draft_weights_cpu_backup")
    drafting = [options for options in server_options(config.rollout) if options.get("speculative_algorithm")]
    if config.fleet.offloads_rollout and any(not any(options.get(name) for name in backups) for options in drafting):
        yield (
            "fleet.colocate and offload_rollout release the memory of servers, and no update restores the layers that "
            "draft tokens for rollout.sglang.speculative_algorithm: set rollout.sglang.enable_draft_weights_cpu_backup"
        )


def _served_otherwise(path: str) -> Iterator[str]:
    """Yield sentences on what SGLang, without an error, computes differently from what the model's config.json says."""
    try:
        model = check_model_folder(path)
    except BadModel:  # reported where folders are checked
        return
    if sees_images(model):
        yield (
            f"rollout.engine is sglang, and the model in {path} reads images ({model.model_type}), which are not sent "
            "to servers: set rollout.engine to transformers"
        )
    if model.model_type == "qwen3_moe" and (model.mlp_only_layers or model.decoder_sparse_step != 1):
        yield (
            "rollout.engine is sglang, which treats every layer of a qwen3_moe model as a mixture of experts; the "
            f"config.json of {path} has dense ones (mlp_only_layers, decoder_sparse_step): set rollout.engine to "
            "transformers"
        )


def _unserved(path: str) -> Iterator[str]:
    """Yield sentences on what servers without a GPU do not serve."""
    try:
        model_type = check_model_folder(path).model_type
    except BadModel:  # reported where folders are checked
        return
    if model_type in UNSERVED:
        yield (
            f"rollout.engine is sglang, whose servers do not serve {model_type} models without a GPU ("
            f"{UNSERVED[model_type]}): set num_gpus_per_engine, or rollout.engine to transformers"
        )


def _code_of_the_model(config: RunConfig) -> Iterator[str]:
    rollout, path = config.rollout, served_model(config)[0]
    try:
        problem = code_problem(path, rollout.sglang, *(group.overrides for group in rollout.server_groups))
    except BadModel:  # reported where folders are checked
        return
    if problem is not None:
        yield f"{'model.path' if path == config.model.path else 'rollout.model_path'}: {problem}"


# Whether two folders hold one model, whose numbers may be rounded in different ways.


_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("_name_or_path", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("attention_dropout", "initializer_range", "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
)
"""Entries of config.json that change no logit, or that say how weights are stored."""


def _variant_problems(option: str, path: str, trained: str) -> Iterator[str]:
    """Yield a sentence where a folder is not another rounding of the trained model: by its config, its end tokens, or
    the names and shapes of its weights. Reads no weights. Problems of one folder alone are left to others."""
    try:
        ours, theirs = _entries(trained), _entries(path)
        if differing := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            name = differing[0]
            yield (
                f"{option}: the config.json in {path} has {name}={theirs.get(name)!r}, and that in {trained} has "
                f"{ours.get(name)!r}: use a folder of the model that is trained"
            )
            return
        ends, of_other = (sorted(end_tokens(folder)) for folder in (trained, path))
        if ends != of_other:
            yield (
                f"{option}: responses end at tokens {of_other} by the configs in {path}, and at {ends} by those in "
                f"{trained}: make eos_token_id in generation_config.json the same"
            )
            return
        mine, others = _shapes(trained), _shapes(path)
    except (BadModel, OSError, ValueError):
        return
    if differing := sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)):
        name = differing[0]
        found, expected = (f"has shape {one[name]}" if name in one else "is missing" for one in (others, mine))
        yield (
            f"{option}: the weight {name} {found} in {path}, and {expected} in {trained}: use a folder of the model "
            "that is trained"
        )


def _entries(folder: str) -> dict[str, Any]:
    return dict(_flat(check_model_folder(folder).to_dict(), ""))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that an update sends, dequantised."""
    names = parameter_names(folder)
    return {name: tuple(one.get_shape()) for name, one in open_weights(Path(folder)).items() if name in names}
