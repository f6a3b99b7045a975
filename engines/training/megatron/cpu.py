"""Support for running megatron-core 0.16.1 without CUDA, and the modules of a layer on the CPU.

megatron-core names the CUDA device in its source: `torch.cuda.current_device()`, `tensor.cuda()`, `device="cuda"`.
`install` adds a finder before the import system's own. While modules below `megatron.core` are imported, the finder
replaces these expressions in their syntax trees. It changes neither the files nor torch. Then `install` patches what
remains; each patch states its reason. Call it in a worker's own process, before anything imports megatron.core. It
refuses to work where CUDA exists.
"""

import ast
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from cairn.engines.processes.syntax import parsed
from cairn.engines.training.megatron.packing import as_rows, context_order
from cairn.engines.types.errors import EngineError

# Modules of a transformer layer on the CPU, under the names that Transformer Engine gives their parameters.
# `install` must run before megatron.core is imported for them.


class Norm(torch.nn.RMSNorm):
    """RMSNorm that permits sequence parallelism, which Megatron's own wrapper rejects.

    The weight only has to be marked: its gradients are then summed over the ranks that share a sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._config = config
        _mark(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(x, self.weight, self._config, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear layer after it, like Transformer Engine's LayerNormLinear.

    Parameters are `layer_norm_weight` and `weight`.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        _mark(self.layer_norm_weight, config)

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        normalised = _normalised(input_, self.layer_norm_weight, self.config, self.eps)
        return super().forward(normalised, *args, **options)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that is whole on every tensor-parallel rank, like Transformer Engine's "duplicated" Linear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        _mark(self.weight, config)

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


# Latent attention recognises by this class that its projections to latents are whole on every rank.
multi_latent_attention.TELinear = ReplicatedLinear


class ExpertRowLinear(RowParallelLinear):
    """Second layer of an expert, without a reduction where one rank has the whole layer.

    Megatron adds the bias to the result in place, which PyTorch forbids on the result of a reduction.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.explicit_expert_comm = True  # the dispatcher reduces


class Attention(torch.nn.Module):
    """Causal attention over packed sequences, with sliding window and learnt softmax offset where the model has them.

    With context parallelism every rank gathers all keys and values. Megatron's DotProductAttention, the only one
    without a GPU, supports neither packed sequences nor context parallelism.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any) -> None:
        super().__init__()
        self._scale = options.get("softmax_scale")
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if windowed and config.window_size else None
        """Number of earlier tokens that a token attends to; None for all."""
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset: Any = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            offset.tensor_model_parallel, offset.partition_dim, offset.partition_stride = True, 0, 1
            self.softmax_offset = offset
        collection = options.get("pg_collection")
        self._group = get_context_parallel_group() if collection is None else collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """Return [T, heads * head_dim] from [T, heads, head_dim], with T this rank's tokens of all sequences."""
        size, rank = self._group.size(), self._group.rank()
        ends = packed_seq_params.cu_seqlens_q_padded
        lengths = (ends[1:] - ends[:-1]).tolist()
        places = everywhere = context_order(lengths, size, rank)
        positions = places[:, 1]
        if size > 1:
            everywhere = torch.cat([context_order(lengths, size, other) for other in range(size)])
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self._group) for x in (key, value))
            places = context_order([length // size for length in lengths], 1, 0)
        query, key, value = (
            as_rows(x, at).transpose(1, 2) for x, at in ((query, places), (key, everywhere), (value, everywhere))
        )
        mask = None
        if size > 1 or self._window is not None or self.softmax_offset is not None:
            mask = self._seen(as_rows(positions, places), max(lengths))
        if self.softmax_offset is not None:
            key, value, mask = self._with_offset(key, value, mask, query.dtype)
        outputs = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return outputs.transpose(1, 2)[places[:, 0], places[:, 1]].flatten(1)

    def _seen(self, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Return [sequences, 1, queries, keys] bool: the keys visible to queries at positions [sequences, queries]."""
        back = positions[..., None] - torch.arange(longest)
        seen = back >= 0 if self._window is None else (back >= 0) & (back <= self._window)
        return seen[:, None]

    def _with_offset(
        self, key: torch.Tensor, value: torch.Tensor, seen: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values with one more entry of zeros, and a mask that adds the offset to its logit.

        The extra key takes its share of the softmax, and its value is zero.
        """
        offset: Any = self.softmax_offset
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        sequences, _, queries, _ = mask.shape
        mask = torch.cat(
            [
                mask.expand(-1, len(offset), -1, -1),
                offset.to(dtype).view(1, -1, 1, 1).expand(sequences, -1, queries, 1),
            ],
            dim=-1,
        )
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return what a checkpoint holds of this module; Megatron calls this on every module."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def _normalised(x: torch.Tensor, weight: torch.Tensor, config: TransformerConfig, eps: float | None) -> torch.Tensor:
    if config.layernorm_zero_centered_gamma:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).type_as(x)
    return F.rms_norm(x, weight.shape, weight, eps)


def _mark(weight: Any, config: TransformerConfig) -> None:
    weight.sequence_parallel = config.sequence_parallel


class CpuSpecProvider(LocalSpecProvider):
    """Modules of a layer on the CPU, in the form that Megatron requests them."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowLinear)

    def core_attention(self) -> type:
        return Attention


def layer_spec(config: TransformerConfig, feed_forward: ModuleSpec) -> ModuleSpec:
    """Return a layer in the form of `get_gpt_layer_with_transformer_engine_spec`.

    Norms are part of the linear layers that follow them, except before experts and latents.
    """
    latent = config.multi_latent_attention
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm if latent else IdentityOp,
            self_attention=_latent_attention() if latent else _attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm if feed_forward.module is MoELayer else IdentityOp,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormColumnParallelLinear,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=NormColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=NormColumnParallelLinear,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


TESTED_VERSION = "0.16.1"
"""Version of megatron-core; `backend.py` rejects any other."""
PACKAGE = "megatron.core"
_STAND_IN = "__cpu_in_place_of_cuda__"


def install() -> None:
    """Let this process import megatron.core without CUDA. Further calls do nothing.

    Raises:
        EngineError: CUDA is available, or megatron.core was imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if torch.cuda.is_available():
        raise EngineError("megatron-core is not to be changed where CUDA exists: give each rank a GPU instead")
    if PACKAGE in sys.modules:
        raise EngineError("megatron.core was imported before it was prepared for the CPU")
    # megatron.core.jit compiles small functions with torch.compile, which needs a C++ compiler and takes minutes.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _Finder())
    _patch_generator_state()
    _patch_router_gemm()
    _patch_token_counts()
    _patch_optimizer_step()
    _patch_delta_net()


def _patch_generator_state() -> None:
    """Replace functions of 0.16.1, tensor_parallel.random, that access CUDA's generator through torch's C interface."""
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_router_gemm() -> None:
    """Define a name that 0.16.1, transformer.moe.moe_utils, leaves unbound without Transformer Engine.

    A router in float32 reads the name. With the value None it takes the branch intended for that case.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.__dict__.setdefault("te_general_gemm", None)


def _patch_token_counts() -> None:
    """Convert token counts to numpy arrays on the CPU too.

    0.16.1, transformer.moe, does so only with counts from a GPU, and torch's all-to-all accepts no tensors as split
    sizes.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_optimizer_step() -> None:
    """Complete the optimizer state that 0.16.1, optimizer.distrib_optimizer, sets from a checkpoint.

    torch's Adam, unlike the fused ones, stores a step count with each parameter. Setting a parameter's state requires
    every entry, and a checkpoint does not hold this one.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**self._get_main_param_and_optimizer_states(model_param), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_with_step


def _patch_delta_net() -> None:
    """Let 0.16.1, ssm.gated_delta_net, build its module without flash-linear-attention, whose kernels need a GPU.

    `delta_net.py` computes without it.
    """
    import megatron.core.ssm.gated_delta_net as gated_delta_net

    gated_delta_net.HAVE_FLA = True


class _Nothing:
    """Stand-in for a stream, an event or a profiler range: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _none(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _no(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> _Nothing:
    return _Nothing()


class _Cuda:
    """Stand-in for `torch.cuda` inside megatron.core: the CPU, where work ends before a call returns."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    Stream = Event = _Nothing
    nvtx = _Nothing()
    default_generators = (torch.default_generator,)
    set_device = synchronize = empty_cache = staticmethod(_none)
    current_stream = default_stream = stream = staticmethod(_nothing)
    is_available = is_current_stream_capturing = staticmethod(_no)
    memory_allocated = max_memory_allocated = memory_reserved = staticmethod(_zero)
    manual_seed = staticmethod(torch.manual_seed)

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    @property
    def random(self) -> "_Cuda":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _OnCpu(ast.NodeTransformer):
    """Replacement of CUDA by the CPU in a syntax tree."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `torch.cuda` by the stand-in."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_STAND_IN, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace `x.cuda(…)` by `x.cpu()`, and `torch.device("cuda", …)` by `torch.device("cpu")`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda":
                node.func.attr, node.args, node.keywords = "cpu", [], []
            elif node.func.attr == "device" and node.args and _is(node.args[0], "cuda"):
                node.args = [ast.copy_location(ast.Constant("cpu"), node)]
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Replace `device="cuda"` by `device="cpu"`, and do not pin memory."""
        self.generic_visit(node)
        if node.arg == "device" and _is(node.value, "cuda"):
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        elif node.arg == "pin_memory" and _is(node.value, True):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace the names of CUDA tensor types, by which Megatron compares types."""
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace("torch.cuda.", "torch.")), node)
        return node


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader that compiles the changed source and ignores compiled files, which belong to the unchanged source."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _OnCpu().visit(parsed(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _STAND_IN, _Cuda())
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # A subclass where some package has replaced Python's own, as beartype does for every package.
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec
