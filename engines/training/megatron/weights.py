"""Mapping of a rank's Megatron parameters to parts of Hugging Face tensors, and what follows from it: loading, and
fingerprints that do not depend on the layout of ranks. `cairn.engines.training.megatron.gathering` exports.

A parameter is a list of blocks: some of its rows are a rectangle of a Hugging Face tensor (a vector is a matrix of one
column). Rows that only pad a vocabulary belong to no block.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from cairn.engines.models.folders import open_weights
from cairn.engines.models.quantized import Slice
from cairn.engines.training.megatron.families.base import Layout, Source, Stretch
from cairn.engines.training.process import gathered
from cairn.engines.training.regions import Region
from cairn.engines.types.errors import BadModel


@dataclass(frozen=True)
class Block:
    """A rectangle of a Hugging Face tensor of `rows` × `columns`, held in consecutive rows of a local parameter."""

    name: str
    rows: int
    columns: int
    row: int
    column: int
    height: int
    width: int
    local_row: int
    shape: tuple[int, ...] | None = None
    """Shape of the Hugging Face tensor, where it is not `rows` × `columns`."""
    transposed: bool = False
    """Whether the local rows are the rectangle's columns."""
    step: int = 1
    """Distance in the tensor between two neighbouring columns of the rectangle."""
    exact: bool = False
    """Whether it stays in float32 where other weights are rounded."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.shape is None else self.shape

    @property
    def column_slice(self) -> slice:
        """Columns of the tensor that the rectangle covers."""
        return slice(self.column, self.column + (self.width - 1) * self.step + 1, self.step)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return [height, width], a view of the local parameter's matrix."""
        size = self.width if self.transposed else self.height
        rows = local[self.local_row : self.local_row + size]
        return rows.T if self.transposed else rows


@dataclass(frozen=True)
class Parameter:
    """A parameter of this rank, or a buffer that is part of the model like one."""

    value: torch.Tensor
    names: tuple[str, ...]
    """Hugging Face tensors that it is made of."""
    blocks: list[Block]
    expert: bool

    @property
    def trained(self) -> bool:
        """Whether an optimizer changes it."""
        return self.value.requires_grad

    @property
    def exact(self) -> bool:
        """Whether it stays in float32 where other weights are rounded."""
        return any(block.exact for block in self.blocks)

    @property
    def matrix(self) -> torch.Tensor:
        """[rows, columns] of the value."""
        return as_matrix(self.value.detach())


def regions(
    kind: str, blocks: Iterable[Block], values: torch.Tensor, start: int = 0
) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the parts of whole tensors, named `kind` and the tensor's name, that consecutive elements of a parameter's
    flattened local value are, as views.

    Args:
        start: number of the parameter's elements before the first of `values`.
    """
    for block in blocks:
        size = block.height * block.width
        first = block.local_row * (block.height if block.transposed else block.width)
        begin, end = max(start, first), min(start + len(values), first + size)
        if begin < end:
            region = Region(
                kind + block.name,
                block.whole_shape,
                block.columns,
                block.row,
                block.column,
                block.height,
                block.width,
                begin - first,
                end - first,
                block.step,
                block.transposed,
            )
            yield region, values[begin - start : end - start]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model by which its parameters are cut."""

    vocabulary: int
    head_dim: int
    query_heads: int
    """Query heads for each key-value head."""
    groups: int
    """Key-value heads."""
    tied: bool


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix.

    A vector becomes one column. With three axes or more, all but the first are flattened into one.
    """
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.flatten(1)


def parameters_of(
    chunks: Sequence[Any], config: Any, source_of: Callable[[str], Source], sizes: Sizes
) -> list[Parameter]:
    """Return all parameters of this rank's part of a model, including the second copy of a tied embedding.

    Args:
        source_of: a function like `Family.parameter`.
    """
    parameters = []
    for chunk in chunks:
        for local_name, value in (*chunk.named_parameters(), *_biases(chunk)):
            name = _global_name(local_name, config, getattr(chunk, "vp_stage", None))
            if sizes.tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            expert = ".experts." in name
            source = source_of(name)
            shape, (ranks, rank) = tuple(as_matrix(value).shape), _part(expert)
            if source.stretches is not None:
                blocks = list(_head_blocks(source, source.stretches(config), shape[1], ranks, rank))
            elif source.layout in _OF_ALL_EXPERTS:
                blocks = list(_expert_blocks(source, value, config.num_moe_experts, ranks, rank))
            else:
                blocks = list(_blocks(source.layout, source.names, shape, sizes, ranks, rank))
            if value.dim() != 2:
                blocks = [replace(block, shape=block.shape or (block.rows, *value.shape[1:])) for block in blocks]
            if is_bias(name):
                blocks = [replace(block, exact=True) for block in blocks]
            parameters.append(Parameter(value, source.names, blocks, expert))
    return parameters


def is_bias(name: str) -> bool:
    """Return whether this is the bias by which a router chooses experts.

    The bias has no gradient, and rounding it would change the choice.
    """
    return name.endswith("router.expert_bias")


def _biases(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in chunk.named_buffers() if is_bias(name))


def load_weights(
    parameters: Iterable[Parameter], files: Mapping[str, Slice], overrides: Mapping[str, torch.Tensor]
) -> None:
    """Fill parameters from weight files, reading only what this rank holds.

    Args:
        files: from `open_files`.
        overrides: whole tensors, each a parameter by itself, to use instead of the files.

    Raises:
        BadModel: a tensor is missing or has another shape.
    """
    with torch.no_grad():
        for parameter in parameters:
            target = parameter.matrix
            target.zero_()
            for block in parameter.blocks:
                if block.name in overrides:
                    target.copy_(as_matrix(overrides[block.name]))
                    continue
                if block.name not in files:
                    raise BadModel(f"the model's weight files lack {block.name}: copy the folder again")
                tensor = files[block.name]
                if tuple(tensor.get_shape()) != block.whole_shape:
                    raise BadModel(
                        f"weight {block.name} has shape {tuple(tensor.get_shape())} where config.json requires "
                        f"{block.whole_shape}"
                    )
                rows = slice(block.row, block.row + block.height)
                if len(block.whole_shape) == 3 and block.rows != block.whole_shape[0]:  # a block of one expert
                    expert, row = divmod(block.row, block.whole_shape[1])
                    part = tensor[expert : expert + 1, row : row + block.height].flatten(0, 1)
                else:
                    part = as_matrix(tensor[rows])
                block.of(target).copy_(part[:, block.column_slice])


def open_files(folder: Path) -> dict[str, Slice]:
    """Return every tensor of a model folder by its name.

    The language model in a model of images and text has the names that it would have alone.
    """
    return {name.replace("model.language_model.", "model.", 1): weight for name, weight in open_weights(folder).items()}


def _global_name(name: str, config: Any, vp_stage: int | None) -> str:
    """Return a parameter's name with layers and experts counted over the whole model."""
    layers = get_transformer_layer_offset(config, vp_stage)
    name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(int(match[0]) + layers), name)
    if config.num_moe_experts:
        ranks, rank = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        first = config.num_moe_experts // ranks * rank
        name = re.sub(
            r"(?<=local_experts\.)\d+|(?<=linear_fc[12]\.weight)\d+$|(?<=linear_fc[12]\.bias)\d+$",
            lambda match: str(int(match[0]) + first),
            name,
        )
    return name


def _part(expert: bool) -> tuple[int, int]:
    """Return the number of ranks that a parameter is cut over, and this rank's index among them."""
    if expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _blocks(
    layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], sizes: Sizes, ranks: int, rank: int
) -> Iterator[Block]:
    height, width = shape
    if layout is Layout.REPLICATED:
        yield Block(names[0], height, width, 0, 0, height, width, 0)
    elif layout is Layout.ROW:
        yield Block(names[0], height, width * ranks, 0, rank * width, height, width, 0)
    elif layout is Layout.COLUMN:  # only embeddings, whose last rank is filled up
        real = min(height, max(0, sizes.vocabulary - rank * height))
        if real:
            yield Block(names[0], sizes.vocabulary, width, rank * height, 0, real, width, 0)
    elif layout is Layout.GATED:
        half = height // 2
        for index in range(2):
            if len(names) == 2:
                yield Block(names[index], half * ranks, width, rank * half, 0, half, width, index * half)
            else:
                yield Block(
                    names[0], height * ranks, width, (index * ranks + rank) * half, 0, half, width, index * half
                )
    else:
        yield from _qkv_blocks(names, width, sizes, ranks, rank)


def _qkv_blocks(names: tuple[str, ...], width: int, sizes: Sizes, ranks: int, rank: int) -> Iterator[Block]:
    local_groups = sizes.groups // ranks
    heads = (sizes.query_heads, 1, 1)
    local_row = 0
    for group in range(rank * local_groups, (rank + 1) * local_groups):
        for name, count in zip(names, heads, strict=True):
            height = count * sizes.head_dim
            yield Block(name, sizes.groups * height, width, group * height, 0, height, width, local_row)
            local_row += height


def _head_blocks(source: Source, stretches: Sequence[Stretch], width: int, ranks: int, rank: int) -> Iterator[Block]:
    pieces = [
        [
            Block(
                source.names[stretch.part],
                stretch.rows,
                width,
                stretch.first + head * (stretch.every or stretch.height),
                0,
                stretch.height,
                width,
                0,
            )
            for head in range(rank * stretch.heads // ranks, (rank + 1) * stretch.heads // ranks)
        ]
        for stretch in stretches
    ]
    local_row = 0
    for block in itertools.chain(*(pieces if source.layout is Layout.HEADS else zip(*pieces, strict=True))):
        yield replace(block, local_row=local_row)
        local_row += block.height


_OF_ALL_EXPERTS = (Layout.EXPERT_IN, Layout.EXPERT_OUT, Layout.EXPERT_BIAS)


def _expert_blocks(source: Source, value: torch.Tensor, experts: int, ranks: int, rank: int) -> Iterator[Block]:
    """Yield the blocks of one expert in a transposed tensor of all experts.

    Biases are rows of that tensor, and vectors here.
    """
    name, vector = source.names[0], value.dim() == 1
    height, width = as_matrix(value).shape
    if source.layout is Layout.EXPERT_IN:
        half, columns = height // 2, height * ranks
        shape = (experts, columns) if vector else (experts, width, columns)
        for index in range(2):
            column = 2 * rank * half + index
            yield Block(
                name, experts * width, columns, source.expert * width, column, width, half, index * half, shape, True, 2
            )
    elif source.layout is Layout.EXPERT_OUT:
        rows = width * ranks
        first = source.expert * rows + rank * width
        yield Block(name, experts * rows, height, first, 0, width, height, 0, (experts, rows, height), True)
    else:
        yield Block(name, experts, height, source.expert, 0, 1, height, 0, (experts, height), True)


@dataclass(frozen=True)
class Ownership:
    """Owner of each block of the whole model: the responsible rank, where several hold the block."""

    owners: dict[tuple[str, int, int], tuple[int, Block]]
    """Mapping from name, row and column to the lowest rank that holds the block, and the block on that rank."""
    frozen: frozenset[str]
    """Tensors that no optimizer changes."""

    @classmethod
    def agree(cls, parameters: Iterable[Parameter], group: dist.ProcessGroup | None = None) -> "Ownership":
        """Determine the owners among the members of a group, by default among all ranks. All of them take part and get
        the same result; an owner is a place in the group."""
        mine = [(block, parameter.trained) for parameter in parameters for block in parameter.blocks]
        every = gathered(mine, dist.get_world_size(group), group)
        owners: dict[tuple[str, int, int], tuple[int, Block]] = {}
        frozen = set()
        for rank, blocks in enumerate(every):
            for block, trained in blocks:
                owners.setdefault((block.name, block.row, block.column), (rank, block))
                if not trained:
                    frozen.add(block.name)
        return cls(owners, frozenset(frozen))

    def owner(self, block: Block) -> int:
        return self.owners[block.name, block.row, block.column][0]

    def tensors(self) -> dict[str, list[tuple[int, Block]]]:
        """Return the blocks of every Hugging Face tensor with their owners, in the same order on all ranks."""
        tensors: dict[str, list[tuple[int, Block]]] = {}
        for key in sorted(self.owners):
            rank, block = self.owners[key]
            tensors.setdefault(block.name, []).append((rank, block))
        return tensors
