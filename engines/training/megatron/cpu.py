"""Support for running megatron-core 0.19.2 without CUDA.

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

from cairn.engines.processes.syntax import parsed
from cairn.engines.types.errors import EngineError

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
        raise EngineError("megatron-core must not be changed where CUDA exists: give each rank a GPU instead")
    if PACKAGE in sys.modules:
        raise EngineError("megatron.core was imported before it was prepared for the CPU")
    # megatron.core.jit compiles small functions with torch.compile, which needs a C++ compiler and takes minutes.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _Finder())
    _leave_out_stash_kernels()
    _patch_generator_state()
    _patch_token_counts()
    _patch_optimizer_step()
    _patch_host_optimizer()
    _patch_delta_net()


def _leave_out_stash_kernels() -> None:
    """Replace the one module of kernels that 0.19.2 imports whether or not Triton is installed, moe.ops.paged_stash.

    Its kernels stash activations of experts on a GPU. Triton has half a gigabyte, and computes nothing without a GPU.
    """
    name = f"{PACKAGE}.transformer.moe.ops.paged_stash"
    kernels: Any = ModuleType(name)
    kernels.GLOBAL_BLOCK_SIZE, kernels.paged_stash_copy_kernel, kernels.paged_stash_pop_kernel = 1024, None, None
    sys.modules[name] = kernels


def _patch_generator_state() -> None:
    """Replace functions of 0.19.2, tensor_parallel.random, that access CUDA's generator through torch's C interface."""
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_token_counts() -> None:
    """Convert token counts to numpy arrays on the CPU too.

    0.19.2, transformer.moe, does so only with counts from a GPU, and torch's all-to-all accepts no tensors as split
    sizes.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_optimizer_step() -> None:
    """Complete the optimizer state that 0.19.2, optimizer.distrib_optimizer, sets from a checkpoint.

    torch's Adam, unlike the fused ones, stores a step count with each parameter. Setting a parameter's state requires
    every entry, and a checkpoint does not hold this one.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**self._get_main_param_and_optimizer_states(model_param), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_with_step


def _patch_host_optimizer() -> None:
    """Let 0.19.2, optimizer.cpu_offloading, treat every parameter as one of a GPU.

    It asks each tensor where it lies, and moves parameters of a GPU alone to the host. Without this, a part of its maps
    stays empty, and its step fails. Its options compare the version of Transformer Engine, which there is none of.
    """
    import megatron.core.optimizer.optimizer_config as optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    optimizer_config.is_te_min_version = lambda *_, **__: False

    share_out = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def share_out_as_on_gpu(self: Any, offload_fraction: float) -> Any:
        groups = self.param_groups
        self.param_groups = [{**group, "params": [_Placed(value) for value in group["params"]]} for group in groups]
        try:
            *inner, copies, originals, exact = share_out(self, offload_fraction)
        finally:
            self.param_groups = groups
        for group in (group for part in inner for group in part):
            group["params"] = [value.tensor for value in group["params"]]
        maps = [{key.tensor: value.tensor for key, value in each.items()} for each in (copies, originals, exact)]
        return (*inner, *maps)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = share_out_as_on_gpu


class _Placed:
    """A tensor that says that it lies on a GPU until `cpu` is called."""

    def __init__(self, tensor: torch.Tensor, is_cuda: bool = True) -> None:
        self.tensor, self.is_cuda, self.dtype, self.numel = tensor, is_cuda, tensor.dtype, tensor.numel

    def detach(self) -> "_Placed":
        return _Placed(self.tensor.detach(), self.is_cuda)

    def clone(self) -> "_Placed":
        return _Placed(self.tensor.clone(), self.is_cuda)

    def float(self) -> "_Placed":
        return _Placed(self.tensor.float(), self.is_cuda)

    def cpu(self) -> "_Placed":
        return _Placed(self.tensor, is_cuda=False)

    def pin_memory(self) -> "_Placed":
        return self


def _patch_delta_net() -> None:
    """Let 0.19.2, ssm.gated_delta_net, build its module without flash-linear-attention, whose kernels need a GPU.

    `delta_net.py` computes without it.
    """
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA = True
    gdn.chunk_gated_delta_rule = common.torch_chunk_gated_delta_rule


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


def _always(value: Any) -> Any:
    """Return a static method that returns a value whatever its arguments."""
    return staticmethod(lambda *_, **__: value)


class _Cuda:
    """Stand-in for `torch.cuda` inside megatron.core: the CPU, where work ends before a call returns."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    Stream = Event = _Nothing
    nvtx = _Nothing()
    default_generators = (torch.default_generator,)
    set_device = synchronize = empty_cache = _always(None)
    current_stream = default_stream = stream = _always(_Nothing())
    is_available = is_current_stream_capturing = _always(False)
    memory_allocated = max_memory_allocated = memory_reserved = _always(0)
    current_device, device_count = _always("cpu"), _always(1)
    manual_seed = staticmethod(torch.manual_seed)

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
        # Some packages replace Python's own loader by a subclass, as beartype does for every package.
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec
