"""What can be known, before anything starts, of servers that hold quantised weights: sentences on what cannot work."""

from collections.abc import Iterator
from pathlib import Path

from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import BadModel
from cairn.engines.quantized import BlockFp8, quantization_of


def quantized_problems(config: RunConfig) -> Iterator[str]:
    """Of servers that read `model.path`, and are sent new weights as it holds them (`cairn.engines.weights.fp8`)."""
    rollout, fleet, path = config.rollout, config.fleet, config.model.path
    servers = [{**rollout.sglang, **group.overrides} for group in rollout.server_groups] or [rollout.sglang]
    try:
        scheme = quantization_of(Path(path))
    except (BadModel, OSError, ValueError):  # told of by _model_problems
        return
    if any(options.get("quantization") for options in servers):
        yield (
            "rollout.sglang.quantization rounds weights when a server starts, and new ones would be taken as they are: "
            "leave it out, and for rollouts in FP8 give a model.path whose config.json says fp8 in blocks"
        )
    if scheme is None:
        return
    if not isinstance(scheme, BlockFp8):
        yield (
            f"servers of rollout.engine=sglang would hold {path} in four bits, in which no weights are sent, since "
            "training knows nothing of such rounding: give a folder in bfloat16 or FP8, or set rollout.engine to "
            "transformers, which computes with what the four bits stand for"
        )
        return
    if not rollout.num_gpus_per_engine and not rollout.external_urls:
        yield (
            f"{path} is in FP8, for which SGLang has no kernels without a GPU: set rollout.num_gpus_per_engine, or "
            "rollout.engine to transformers, which computes with what the FP8 stands for"
        )
    if rollout.dtype != "bfloat16":
        yield f"{path} is in FP8, with which SGLang computes in bfloat16 alone: set rollout.dtype to bfloat16"
    if fleet.update_weight_transport == "disk":
        yield (
            f"fleet.update_weight_transport is disk, by which servers that hold {path} in FP8 would read plain "
            "weights: set it to tensor or distributed"
        )
    if fleet.check_weight_update_equal:
        yield (
            "fleet.check_weight_update_equal compares log-probs with the trainer's to what rounding to bfloat16 "
            f"explains, and servers hold {path} in FP8: leave it out"
        )
