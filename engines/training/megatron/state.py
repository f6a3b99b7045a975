"""Training state of a rank: parameters and moments, wherever Megatron's optimizer stores them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.nn import functional

from cairn.engines.training.megatron.gathering import Receivers, Replica, gather
from cairn.engines.training.megatron.model import replicas
from cairn.engines.training.megatron.weights import Block, Ownership, Parameter, regions
from cairn.engines.training.optimizer import MOMENTS
from cairn.engines.training.parts import NamedParts
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.fingerprint import digest, fingerprint

# Fingerprints of a training state that Megatron has cut into pieces, equal on every layout of ranks: the fingerprints
# of the parts of Hugging Face tensors that each rank holds sum up to `cairn.engines.weights.fingerprint.fingerprint` of
# the whole.


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter's flattened local value, or of a tensor of its shape, to fingerprint."""

    kind: str
    values: torch.Tensor
    """[end - start]."""
    start: int
    blocks: list[Block]


Fingerprints = tuple[list[tuple[str, tuple[int, ...], str]], torch.Tensor]
"""Name, shape and dtype of n tensors, and their fingerprints [n, 2] int64."""


def sharded_fingerprints(
    pieces: Iterable[Piece],
    kinds: Mapping[str, Collection[str]],
    ownership: Ownership,
    dtype: str,
    device: torch.device,
) -> Fingerprints:
    """Return the fingerprints of every whole tensor of every kind; all ranks take part.

    Args:
        kinds: prefixes of the tensors' names, such as "exp_avg.", and the names that each is combined with; every piece
            has one of these kinds.
        dtype: number format that is listed for all tensors.
        device: device of the sum over ranks.
    """
    tensors = ownership.tensors()
    entries = [
        (f"{kind}{name}", parts[0][1].whole_shape, dtype)
        for kind, names in kinds.items()
        for name, parts in tensors.items()
        if name in names
    ]
    index = {name: place for place, (name, _, _) in enumerate(entries)}
    sums = torch.zeros(len(entries), 2, dtype=torch.int64, device=device)
    for piece in pieces:
        for name, values, offset in _runs(piece):
            sums[index[piece.kind + name]] += fingerprint(values, offset).to(device)
    dist.all_reduce(sums)
    return entries, sums


def _runs(piece: Piece) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield a piece's content as runs of consecutive elements of whole tensors: name, elements, offset of the first.

    Blocks that are adjacent in the whole tensor, such as those of a query projection, form one run.
    """
    run: list[torch.Tensor] = []
    name, first, end = "", 0, 0
    for block in sorted(piece.blocks, key=lambda block: (block.name, block.row, block.column)):
        values, offset = _part(piece, block)
        if run and (name, end) == (block.name, offset):
            run.append(values)
        else:
            if run:
                yield name, torch.cat(run), first
            run, name, first = [values], block.name, offset
        end = offset + len(values)
    if run:
        yield name, torch.cat(run), first


def _part(piece: Piece, block: Block) -> tuple[torch.Tensor, int]:
    """Return a piece's elements of a block, and their offset in the whole tensor.

    For a block that is narrower than the tensor these are whole rows, zero where other ranks hold them: zeros add
    nothing to a fingerprint.
    """
    width = block.height if block.transposed else block.width  # width of the local parameter
    first = block.local_row * width
    start = max(piece.start, first)
    end = max(start, min(piece.start + len(piece.values), first + block.height * block.width))
    values = piece.values[start - piece.start : end - piece.start]
    if block.transposed:
        return _spread(values, start - first, block), block.row * block.columns
    row, column = divmod(start - first, block.width)
    if block.width == block.columns:
        return values, (block.row + row) * block.columns + column
    rows = functional.pad(values, (column, -(column + len(values)) % block.width)).view(-1, block.width)
    whole = functional.pad(rows, (block.column, block.columns - block.column - block.width))
    return whole.flatten(), (block.row + row) * block.columns


def _spread(values: torch.Tensor, start: int, block: Block) -> torch.Tensor:
    """Return whole rows of the tensor, zero except for these elements of a transposed block.

    Args:
        start: number of elements of the block before them, in the order of the local parameter.
    """
    size = block.height * block.width
    rectangle = functional.pad(values, (start, size - start - len(values))).view(block.width, block.height)
    whole = values.new_zeros(block.height, block.columns)
    whole[:, block.column_slice] = rectangle.T
    return whole.flatten()


# Offloading frees memory of a training state for a while; the state is restored bit for bit.


@dataclass(frozen=True)
class _FreedMemory:
    """Freed memory."""

    storage: torch.UntypedStorage
    size: int
    host: torch.Tensor | None
    """[size] bytes on the host with its content; None where the content is dropped."""


class Memory:
    """Release and restoring of the memory below tensors.

    The tensor objects stay the same. Megatron's parameters, master weights and gradients are views into large buffers,
    known to buckets, shards and hooks. All of them are valid again once the memory is restored.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._freed: dict[int, _FreedMemory] = {}

    def free(self, copied: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]) -> None:
        """Free the memory of all tensors on the device.

        Args:
            copied: tensors whose content is copied to the host, pinned where a GPU will read it.
            dropped: tensors whose content is not needed again.
        """
        for tensor in copied:
            self._free(tensor, copy=True)
        for tensor in dropped:
            self._free(tensor, copy=False)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Restore the memory; dropped content is zero."""
        for freed in self._freed.values():
            freed.storage.resize_(freed.size)
            if freed.host is None:
                torch.empty(0, dtype=torch.uint8, device=self._device).set_(freed.storage).zero_()
            else:
                freed.storage.copy_(freed.host.untyped_storage())
        self._freed.clear()

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the content of a tensor that was not dropped: the tensor itself, or its copy on the host."""
        freed = self._freed.get(tensor.untyped_storage()._cdata)
        if freed is None or freed.host is None:
            return tensor
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(freed.host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _free(self, tensor: torch.Tensor, *, copy: bool) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if tensor.device.type != self._device.type or not size:
            return
        host = None
        if copy:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.untyped_storage().copy_(storage)
        self._freed[storage._cdata] = _FreedMemory(storage, size, host)
        storage.resize_(0)


def _inner(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that hold moments: those on the host and on the GPU, where Megatron has both."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _set_to_zero(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            # torch's Adam counts steps for each parameter, the fused ones for a group.
            counts = {"step": torch.tensor(0.0)} if isinstance(optimizer, torch.optim.Adam) else {}
            optimizer.state[parameter] = {**counts, **state}


def own_loaded_state(optimizer: Any) -> None:
    """Copy a loaded state into memory of its own, where Megatron updates it on the host.

    0.19.2 sets it to views of tensors that hold the state of all data-parallel ranks, which would stay as long. It also
    leaves a second copy of the master weights.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            for inner in part.optimizer.sub_optimizers:
                for state in inner.state.values():
                    state.update({name: state[name].clone() for name in MOMENTS})
            part.optimizer._sync_sub_optimizers_state_to_hdo()


@dataclass(frozen=True)
class _Held:
    """Consecutive elements of one kind of a parameter's state."""

    kind: str
    parameter: Parameter
    values: torch.Tensor
    start: int
    """Number of the parameter's elements before them."""
    replicated: bool
    """Whether all replicas of the parameter hold the same."""


class State:
    """Master weights and moments, float32, of this rank's parameters; frozen parameters have neither."""

    def __init__(self, parameters: Sequence[Parameter], optimizer: Any, prefix: str) -> None:
        """Create the moments, and determine with all ranks which rank owns each block.

        Args:
            prefix: prefix of the parameters' names in the state.
        """
        self._kinds = {"param": f"parameters.{prefix}", **{moment: f"{moment}.{prefix}" for moment in MOMENTS}}
        self._parameters, self._optimizer = parameters, optimizer
        self._ownership = Ownership.agree(parameters)
        self._replicas_of_model = Replica.agree(parameters)
        self._rank = dist.get_rank()
        self._replicas = {expert: replicas(expert) for expert in {parameter.expert for parameter in parameters}}
        self._device = parameters[0].value.device
        self._memory = Memory(self._device)
        self._create_moments()

    @property
    def frozen(self) -> frozenset[str]:
        """Hugging Face tensors, of all ranks, that no update changes."""
        return self._ownership.frozen

    @property
    def values(self) -> list[torch.Tensor]:
        """This rank's parameters, in the number format of the passes."""
        return [parameter.value.detach() for parameter in self._parameters]

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of all whole tensors, named as in `cairn.engines.training.sharding.state_digest`.

        All ranks take part.
        """
        tensors = self._ownership.tensors().keys()
        trained = tensors - self.frozen
        kinds = {kind: tensors if name == "param" else trained for name, kind in self._kinds.items()}
        return sharded_fingerprints(self._pieces(), kinds, self._ownership, "torch.float32", self._device)

    def weights_checksum(self, dtypes: Sequence[torch.dtype]) -> str:
        """Return `weights_checksum` of the whole tensors, rounded to each of `dtypes` in turn; all ranks take part."""

        def pieces() -> Iterator[Piece]:
            for parameter in self._parameters:
                values = parameter.value.detach()
                for dtype in (*(() if parameter.exact else dtypes), torch.float32):
                    values = values.to(dtype)
                yield Piece("", values.reshape(-1), 0, self._owned(parameter, [self._rank]))

        kinds = {"": self._ownership.tensors()}
        return digest(*sharded_fingerprints(pieces(), kinds, self._ownership, "float32", self._device))

    def gather_weights(
        self, dtype: torch.dtype, bucket_bytes: int, to: Receivers = Receivers.FIRST
    ) -> Iterator[Bucket]:
        """Yield buckets of whole weights on the device.

        This works whether offloaded or not; see `cairn.engines.training.megatron.gathering.gather`.
        """
        content = self._memory.content
        return gather(self._parameters, self._replicas_of_model, dtype, self._device, content, bucket_bytes, to)

    def offload(self) -> None:
        """Move weights, master weights and moments to host memory. Gradients are dropped."""
        self._optimizer.zero_grad()
        values: list[Any] = [parameter.value for parameter in self._parameters if parameter.trained]
        self._memory.free(self._tensors(), (value.main_grad for value in values))

    def onload(self) -> None:
        """Move the state back to the device; gradients are zero."""
        self._memory.restore()

    def set_rates(self, lr: float, weight_decay: float) -> None:
        """Set learning rate and weight decay of the next step.

        This applies `wd_mult`, by which only matrices decay. In Megatron only its own scheduler does, which is not
        used.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay * group["wd_mult"]

    def parts(self, *, owned: bool) -> NamedParts:
        """Return the parts of whole tensors that this rank holds, or with `owned` those that it writes. What all
        replicas hold they write in equal shares."""
        for held in self._held():
            replicas_of_it = self._replicas[held.parameter.expert]
            blocks = self._owned(held.parameter, replicas_of_it) if owned else held.parameter.blocks
            for region, values in regions(held.kind, blocks, held.values, held.start):
                first, last = 0, len(region)
                if owned and held.replicated:
                    place, count = replicas_of_it.index(self._rank), len(replicas_of_it)
                    first, last = len(region) * place // count, len(region) * (place + 1) // count
                yield region.part(first, last), values[first:last]

    def filled(self) -> None:
        """Make the weights of the passes from master weights that were replaced in their place; all ranks take part."""
        for part in self._optimizer.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for value, inner in part.optimizer.param_to_inner_param.items():
                    source, copy = (inner, value) if part.optimizer.param_update_in_fp32 else (value, inner)
                    if copy is not source:
                        copy.data.copy_(source)
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
            if isinstance(part, DistributedOptimizer):
                part.start_param_sync_for_bucket_group_subset()

    def forget_moments(self) -> None:
        """Set the moments to zero."""
        for part in self._optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                for name in MOMENTS:
                    state[name].zero_()

    def set_steps(self, steps: int) -> None:
        """Set the optimizer's step count, which determines the bias correction of its moments."""
        for part in self._optimizer.chained_optimizers:
            for optimizer in _inner(part.optimizer):
                if isinstance(optimizer, torch.optim.Adam):  # counts for each parameter, the fused ones for a group
                    for state in optimizer.state.values():
                        state["step"] = torch.tensor(float(steps))
                else:
                    for group in optimizer.param_groups:
                        group["step"] = steps
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for group in part.optimizer.param_groups:
                    group.pop("step", None)  # a loaded count would replace the inner optimizers' own before every step

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that persist from one update to the next; several may share memory."""
        for parameter in self._parameters:
            yield parameter.value
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _create_moments(self) -> None:
        """Create the moments before the first step, so that the first state has a digest too."""
        for part in self._optimizer.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for optimizer in part.optimizer.sub_optimizers:
                    _set_to_zero(optimizer)
                part.optimizer._sync_sub_optimizers_state_to_hdo()
            elif isinstance(part.optimizer, torch.optim.Adam):
                _set_to_zero(part.optimizer)
            else:
                part.init_state_fn(part.optimizer, part.config)

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces that this rank contributes to fingerprints.

        With the distributed optimizer these are its own part of what its replicas hold together, otherwise everything
        that it owns.
        """
        for held in self._held():
            owners = [self._rank] if held.replicated else self._replicas[held.parameter.expert]
            yield Piece(held.kind, held.values.float(), held.start, self._owned(held.parameter, owners))

    def _held(self) -> "Iterator[_Held]":
        """Yield the whole state as this rank holds it."""
        by_parameter: dict[torch.Tensor, Parameter] = {p.value: p for p in self._parameters}
        for parameter in self._parameters:
            if not parameter.trained:
                yield _Held(self._kinds["param"], parameter, parameter.value.detach().view(-1), 0, True)
        for part in self._optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                for value in part.model_param_group_index_map:
                    span = part._get_model_param_range_map(value)["param"]
                    tensors = part._get_main_param_and_optimizer_states(value)
                    for name, kind in self._kinds.items():
                        yield _Held(kind, by_parameter[value], tensors[name].detach().view(-1), span.start, False)
            else:
                for group in part.optimizer.param_groups:
                    for main in group["params"]:
                        parameter = by_parameter[self._model_parameter(part, main)]
                        tensors = {"param": main, **part.optimizer.state[main]}
                        for name, kind in self._kinds.items():
                            yield _Held(kind, parameter, tensors[name].detach().view(-1), 0, True)

    def _owned(self, parameter: Parameter, owners: Sequence[int]) -> list[Block]:
        """Return the blocks owned by one of the `owners` ranks."""
        return [block for block in parameter.blocks if self._ownership.owner(block) in owners]

    def _model_parameter(self, part: Any, main: torch.Tensor) -> torch.Tensor:
        if not hasattr(part, "float16_groups"):
            return main
        if not hasattr(self, "_of_main"):
            self._of_main: dict[torch.Tensor, torch.Tensor] = {}
        if main not in self._of_main:
            pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            self._of_main |= {copy: own for group, copies in pairs for own, copy in zip(group, copies, strict=True)}
        return self._of_main.get(main, main)
