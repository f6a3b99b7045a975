"""Megatron's options, by Megatron's own names: which ones exist, and which combinations are rejected.

This module reads megatron-core's source without importing it, so a configuration can be checked before anything starts.
"""

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.configs import Config, sees_images
from cairn.engines.processes.syntax import parsed
from cairn.engines.training.megatron.families import family_of
from cairn.engines.training.megatron.permitted import PERMITTED, TESTED_VERSION
from cairn.engines.types.errors import BadModel

SOURCES = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Files and classes whose fields declare the options, by the part of Megatron that takes them."""

SET_BY_TRAINING = {
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "dtype"),
    **{name: name for name in ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "deterministic_mode")},
    **{name: name for name in ("lr", "min_lr", "optimizer", "weight_decay")},
}
"""Megatron's options that follow from an option of `training`, and that option."""

SET_HERE = {
    "attention_dropout": "dropout would make log-probs differ from the rollout's",
    "average_in_collective": "gradients are summed: each rank's loss is its share of the whole",
    "calculate_per_token_loss": "algorithm.calculate_per_token_loss sets the weights of tokens",
    "cross_entropy_loss_fusion": "its gradient is rounded to bfloat16",
    "decoupled_lr": "all parameters have the learning rate of training.lr",
    "decoupled_min_lr": "all parameters have the learning rate of training.lr",
    "grad_reduce_in_fp32": "gradients are always summed in float32",
    "hidden_dropout": "dropout would make log-probs differ from the rollout's",
    "moe_aux_loss_coeff": "its gradients are divided by a count of tokens, which Cairn's loss has in its weights",
    "moe_expert_capacity_factor": "tokens would be dropped silently",
    "moe_z_loss_coeff": "its gradients are divided by a count of tokens, which Cairn's loss has in its weights",
    "mtp_num_layers": "the layers would be trained from scratch, by a loss that takes no part in the objective",
    "overlap_param_gather": "weights would still be on their way when an update ends, and are exported and scored then",
    "perform_initialization": "without it Megatron forgets which parameters are cut, and clips by a wrong norm",
    "use_megatron_fsdp": "the distributed optimizer is the sharding that is supported",
    "variable_seq_lengths": "it follows from pipeline_model_parallel_size",
}
"""Options that may not be set, since the engine depends on them, and why."""


class MegatronMissing(BadModel):
    """Error: megatron-core is not installed."""


@lru_cache
def option_names() -> dict[str, frozenset[str]]:
    """Return the names of all options, by the part of Megatron that takes them. Raises MegatronMissing."""
    spec = find_spec("megatron")
    folders = [Path(folder) / "core" for folder in (spec.submodule_search_locations or ())] if spec else []
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise MegatronMissing(
            "megatron-core is not installed: pip install 'cairn-rl[megatron]', and on Python 3.11, for which it has "
            f"wheels too, pip install --no-deps --ignore-requires-python megatron-core=={TESTED_VERSION}"
        )
    return {
        part: frozenset(name for file, cls in classes for name in _fields(folder / file, cls))
        for part, classes in SOURCES.items()
    }


def options_of(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that a part of Megatron takes: "transformer", "ddp" or "optimizer"."""
    names = option_names()[part]
    return {name: value for name, value in options.items() if name in names}


def problems(training: TrainingConfig, model_path: str) -> Iterator[str]:
    """Yield messages on options that Megatron does not have or that cannot be set, and on layouts that do not fit."""
    from cairn.engines.models.folders import check_model_folder  # PyTorch takes seconds to import

    try:
        config = check_model_folder(model_path)
        if sees_images(config):
            raise BadModel(
                f"Model type {config.model_type} in {model_path} reads images, which are not passed to Megatron: set "
                "training.engine to torch."
            )
        hf = config.get_text_config()
    except BadModel as error:
        yield f"training.engine: {error}"
        return
    yield from model_problems(training, hf)
    yield from _gpu_problems(training, hf)


def model_problems(training: TrainingConfig, hf: Config) -> Iterator[str]:
    """Yield the messages that depend only on the configuration and a model's config, not on the machine."""
    try:
        derived = family_of(hf).transformer(hf)
        names = frozenset().union(*option_names().values())
    except BadModel as error:  # megatron-core is missing, or it cannot train the model
        yield f"training.engine: {error}"
        return
    for name in training.megatron:
        if name in SET_BY_TRAINING:
            yield f"training.megatron.{name} follows from training.{SET_BY_TRAINING[name]}: set that"
        elif name in SET_HERE:
            yield f"training.megatron.{name} cannot be set: {SET_HERE[name]}"
        elif name in derived and name not in PERMITTED:
            yield f"training.megatron.{name} follows from the model's config.json; leave it out"
        elif name in names - PERMITTED:
            yield (
                f"training.megatron.{name} is not an option that places, speeds up or checks the work, and only those "
                "can be set: leave it out"
            )
        elif name not in names:
            close = difflib.get_close_matches(name, names & PERMITTED, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"training.megatron.{name} is not an option of megatron-core {_version()}{hint}"
    yield from _layout_problems(training, derived)


def _layout_problems(training: TrainingConfig, derived: Mapping[str, Any]) -> Iterator[str]:
    tensor, pipeline = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    options = training.megatron
    heads, groups, layers = (derived[name] for name in ("num_attention_heads", "num_query_groups", "num_layers"))
    if heads % tensor or groups % tensor:
        yield (
            f"training.megatron.tensor_model_parallel_size is {tensor}, which must divide the model's {heads} "
            f"attention heads and {groups} key-value heads"
        )
    if derived["ffn_hidden_size"] % tensor:
        yield (
            f"training.megatron.tensor_model_parallel_size is {tensor}, which must divide the width of the model's "
            f"feed-forward part, {derived['ffn_hidden_size']}"
        )
    linear = derived.get("linear_attention_freq") and derived["linear_num_key_heads"]
    if linear and linear % tensor:
        yield (
            f"training.megatron.tensor_model_parallel_size is {tensor}, which must divide the {linear} key heads of "
            "the model's gated delta networks"
        )
    if not _layers_fit(layers, pipeline, options):
        yield (
            f"the model's {layers} layers cannot be spread evenly over {pipeline} pipeline stages as training.megatron "
            "asks: choose other stages, or num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    experts, expert_ranks = derived.get("num_moe_experts"), options.get("expert_model_parallel_size") or 1
    if expert_ranks > 1 and (experts is None or experts % expert_ranks):
        yield f"training.megatron.expert_model_parallel_size is {expert_ranks}; the model has {experts or 'no'} experts"
    if experts and tensor > 1 and not options.get("sequence_parallel"):
        yield (
            "training.megatron.tensor_model_parallel_size > 1 needs training.megatron.sequence_parallel: true, since "
            "the model has experts"
        )
    yield from _width_problems(training, derived)
    if derived.get("rope_type") == "rope" and options.get("apply_rope_fusion"):
        yield (
            "training.megatron.apply_rope_fusion is true, and the model's latent attention has a rotary embedding "
            "without YaRN, which Megatron does not fuse: leave it out"
        )
    if experts and derived["add_bias_linear"] and (options.get("expert_tensor_parallel_size") or tensor) > 1:
        yield (
            "the model's experts have biases, which Megatron does not cut over ranks: set "
            "training.megatron.expert_tensor_parallel_size: 1"
        )
    if derived.get("experimental_attention_variant") == "dsa":
        yield from _indexer_problems(training, derived)
    if options.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "training.megatron.moe_token_dispatcher_type=allgather needs as many tokens on every rank, which packed "
            "micro-batches do not have: set alltoall"
        )


def _indexer_problems(training: TrainingConfig, derived: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages on layouts in which Megatron's sparse attention does not run.

    Megatron itself checks pipelines whose stages differ.
    """
    options = training.megatron
    if training.ranks_of_sequence > 1 and options.get("cp_comm_type") != "allgather":
        yield (
            "training.megatron.context_parallel_size is above 1, which the model's sparse attention supports only with "
            "training.megatron.cp_comm_type: allgather"
        )
    every, first = derived["dsa_indexer_topk_freq"], derived["dsa_indexer_skip_topk_offset"]
    stages = training.pipeline_model_parallel_size * (options.get("virtual_pipeline_model_parallel_size") or 1)
    even = not any(options.get(name) for name in options if name.startswith(("num_layers_in_", "account_for_")))
    if options.get("pipeline_model_parallel_layout") is None and even:
        starts = range(0, derived["num_layers"], max(derived["num_layers"] // stages, 1))
        if any(max(layer + 1 - first, 0) % every for layer in starts):
            yield (
                "a stage of the pipeline would begin with a layer that takes its keys from the layer before it: choose "
                f"stages that begin with one of the layers {first}, {first + every} and so on, counted from 1"
            )


def _width_problems(training: TrainingConfig, derived: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages on the widths of experts, which Megatron cuts like dense layers, or over fewer ranks."""
    tensor = training.tensor_model_parallel_size
    expert = training.megatron.get("expert_tensor_parallel_size")
    cuts = (
        ("moe_ffn_hidden_size", "an expert", "expert_tensor_parallel_size" if expert else "", expert or tensor),
        ("moe_shared_expert_intermediate_size", "the shared experts", "", tensor),
    )
    for field, whose, option, ranks in cuts:
        if (width := derived.get(field)) and width % ranks:
            yield (
                f"training.megatron.{option or 'tensor_model_parallel_size'} is {ranks}, which must divide the width "
                f"of {whose} of the model, {width}"
            )


def _layers_fit(layers: int, pipeline: int, options: Mapping[str, Any]) -> bool:
    """Return whether every pipeline stage, and every part of it in a virtual pipeline, gets equally many layers.

    A first or last stage with a configured number of layers may differ. Megatron checks an explicit layout itself.
    """
    if options.get("pipeline_model_parallel_layout") is not None:
        return True
    ends = [options.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    configured = [count for count in ends if count is not None]
    counted = [options.get(f"account_for_{part}_in_pipeline_split", False) for part in ("embedding", "loss")]
    left, stages = layers + sum(counted) - sum(configured), pipeline - len(configured)
    parts = options.get("virtual_pipeline_model_parallel_size") or 1
    middle = left > 0 and left % (stages * parts) == 0 if stages > 0 else left == stages == 0
    return middle and all(count > 0 and count % parts == 0 for count in configured)


def _gpu_problems(training: TrainingConfig, hf: Config) -> Iterator[str]:
    if not training.num_gpus_per_rank:
        return
    if find_spec("transformer_engine") is None:
        yield (
            "training.engine=megatron on GPUs needs Transformer Engine: pip install --no-build-isolation "
            "'transformer-engine[pytorch]'"
        )
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()) and find_spec("fla") is None:
        yield (
            "the model's gated delta networks need flash-linear-attention on GPUs: pip install flash-linear-attention"
        )
    if getattr(hf, "index_topk", None) and training.megatron.get("dsa_kernel_backend", "none") == "none":
        yield (
            "the model's sparse attention needs kernels on GPUs, without which it copies the chosen keys and values of "
            "every token: set training.megatron.dsa_kernel_backend to tilelang or cudnn"
        )
    if training.dtype == "float32":
        yield (
            "training.dtype=float32 does not work with training.engine=megatron on GPUs, where attention over packed "
            "samples needs bfloat16: set training.dtype to bfloat16"
        )


def _fields(file: Path, name: str) -> Iterator[str]:
    for node in parsed(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id


def _version() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "as installed"
