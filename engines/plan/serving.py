"""Weights that rollout servers hold, and the sizes that SGLang's layout must divide."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.engines.plan.tensors import Model, Part, Tensor

MIB = 2**20


@dataclass(frozen=True)
class Serving:
    """The layout of a server, from SGLang's options."""

    tensor: int
    """Ranks of the server (`tp_size`)."""
    data: int = 1
    """Groups of ranks with their own samples in attention (`attn_dp_size`)."""
    dense_tensor: int = 1
    """Ranks that share each feed-forward part without experts (`moe_dense_tp_size`)."""
    expert: int = 1
    """Expert-parallel ranks (`ep_size`)."""
    exchanges_tokens: bool = False
    """Whether tokens go to the ranks of their experts and back (`moe_a2a_backend`)."""
    data_head: bool = False
    """Whether each group of ranks has an output layer of its own (`enable_dp_lm_head`)."""

    @property
    def attention(self) -> int:
        """Ranks that share attention, and with data-parallel attention the embedding."""
        return max(1, self.tensor // self.data)

    @property
    def shared_experts(self) -> int:
        """Ranks that share each expert that all tokens pass."""
        return 1 if self.exchanges_tokens else self.tensor

    @property
    def head(self) -> int:
        """Ranks that share the output layer."""
        return self.attention if self.data_head else self.tensor

    @classmethod
    def of(cls, options: Mapping[str, Any], num_gpus: float) -> "Serving":
        """Return the layout from the options of `rollout.sglang` and the GPUs of an engine."""
        tensor = int(options.get("tp_size") or max(1, num_gpus))
        older = options.get("dp_size") if options.get("enable_dp_attention") else None
        data = int(options.get("attn_dp_size") or older or 1)
        return cls(
            tensor,
            data,
            int(options.get("moe_dense_tp_size") or tensor),
            int(options.get("ep_size") or 1),
            options.get("moe_a2a_backend", "none") != "none",
            bool(options.get("enable_dp_lm_head")),
        )


def served_parameters(model: Model, serving: Serving) -> float:
    """Return the number of weight elements on each rank, as the models of SGLang 0.5.23 divide them."""

    def ranks(tensor: Tensor) -> int:
        match tensor.part:
            case Part.EXPERT:
                return serving.tensor
            case Part.HEAD:
                return serving.head
            case Part.EMBEDDING:
                return serving.attention
            case Part.CUT if re.search(r"\.shared_experts?\.", tensor.name):
                return serving.shared_experts
            case Part.CUT:
                return serving.dense_tensor if ".mlp." in tensor.name else serving.attention
        return 1

    return sum(tensor.size / ranks(tensor) for tensor in model.tensors)


def default_static_fraction(memory: float, serving: Serving, options: Mapping[str, Any]) -> float:
    """Return the `mem_fraction_static` that SGLang 0.5.23 chooses by default (`arg_groups/memory_hook.py`).

    The fraction is what remains of a GPU's memory after 1.5 MiB for each token of a prefill chunk, 2 MiB for each
    sample of the largest decoding graph, which `max_running_requests` limits, and more for ranks and for data-parallel
    attention. On GPUs above 60 GiB at least 10 GiB stay free. The graphs of DeepEP take 2 GiB. SGLang also counts the
    graphs of prefill; this function does not.

    Args:
        memory: bytes of a GPU.
    """
    gpu = memory / MIB
    large = serving.tensor >= 4
    table = (
        (20 * 1024, 2048, 8),
        (35 * 1024, 4096, 160 if large else 48),
        (60 * 1024, 4096, 160 if large else 32),
        (160 * 1024, 8192, 512 if large else 256),
        (float("inf"), 16384, 512),
    )
    _, chunk, batch = next(row for row in table if gpu < row[0])
    chunk = int(options.get("chunked_prefill_size") or chunk)
    batch = min(batch, int(options.get("max_running_requests") or batch))
    reserved = 512 + 1.5 * max(chunk, 2048) + serving.tensor / 8 * 1024
    if not options.get("disable_cuda_graph"):
        reserved += 2 * batch
    if serving.data > 1:
        reserved += batch * serving.data * (4.5 if batch > 300 else 3)
    if gpu > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if options.get("moe_a2a_backend") == "deepep" and not options.get("disable_cuda_graph"):
        reserved += 2 * 1024
    return round((gpu - reserved) / gpu, 3)


def serving_problems(model: Model, serving: Serving, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on sizes of the model that SGLang's ranks cannot divide."""
    say = "rollout.sglang"
    if serving.tensor % serving.data:
        yield f"{say}.attn_dp_size is {serving.data}, which must divide tp_size, {serving.tensor}"
        return
    if model.heads % serving.attention:
        yield (
            f"attention of a rollout engine is cut over {serving.attention} ranks, which must divide the model's "
            f"{model.heads} attention heads: change rollout.num_gpus_per_engine, or {say}.attn_dp_size"
        )
    if not model.latent and model.kv_heads % serving.attention and serving.attention % model.kv_heads:
        yield (
            f"attention of a rollout engine is cut over {serving.attention} ranks, and the model has "
            f"{model.kv_heads} key-value heads: one of the two must divide the other"
        )
    if serving.tensor % serving.expert:
        yield f"{say}.ep_size is {serving.expert}, which must divide the engine's {serving.tensor} ranks"
        return
    if serving.expert > 1 and model.experts % serving.expert:
        yield f"{say}.ep_size is {serving.expert}; the model has {model.experts if model.experts > 1 else 'no'} experts"
    layers, cut = model.layers, serving.tensor // serving.expert
    experts = {layer.expert_width for layer in layers}
    shared = {layer.width for layer in layers if layer.expert_width}
    dense = {layer.width for layer in layers if not layer.expert_width}
    for widths, ranks, whose, way in (
        (experts, cut, "an expert's width", f"raise {say}.ep_size"),
        (shared, serving.shared_experts, "the shared experts' width", "lower rollout.num_gpus_per_engine"),
        (dense, serving.dense_tensor, "a feed-forward width", f"set {say}.moe_dense_tp_size"),
    ):
        size = _block(model) if ranks > 1 else 1
        if wrong := {width for width in widths if width % (ranks * size)}:
            blocks = f", in FP8 blocks of {size}," if size > 1 else ""
            yield f"{whose} of {min(wrong)}{blocks} cannot be cut over {ranks} ranks of a rollout engine: {way}"


def _block(model: Model) -> int:
    """Return the size of the blocks of FP8 weights, which ranks cannot divide; 1 where there are none."""
    stored = getattr(model.config, "quantization_config", None) or {}
    return max(stored.get("weight_block_size") or (1,)) if stored.get("quant_method") == "fp8" else 1
