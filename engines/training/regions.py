"""Parts of whole tensors that ranks hold, as places in the whole tensor, whatever the layout of ranks."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from cairn.engines.weights.fingerprint import bit_array


@dataclass(frozen=True)
class Region:
    """Elements `start` to `end` of a rectangle of a tensor, in the order in which a rank holds the rectangle."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    columns: int
    """Columns of the matrix that the whole tensor is flattened to."""
    row: int
    column: int
    height: int
    width: int
    start: int
    end: int
    step: int = 1
    """Distance in the tensor between two neighbouring columns of the rectangle."""
    transposed: bool = False
    """Whether the rank holds the rectangle column by column."""

    @classmethod
    def rows(cls, name: str, shape: tuple[int, ...], row: int, height: int) -> "Region":
        """Return whole rows of a tensor, of which a scalar has one."""
        columns = prod(shape[1:])
        return cls(name, shape, columns, row, 0, height, columns, 0, height * columns)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "Region":
        """Return all of a tensor."""
        return cls.rows(name, shape, 0, shape[0] if shape else 1)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def geometry(self) -> tuple[int, int, int, int, int, int, bool]:
        """The rectangle and its order."""
        return self.columns, self.row, self.column, self.height, self.width, self.step, self.transposed

    @property
    def exists(self) -> bool:
        """Whether it has elements, all of which lie in its tensor."""
        return (
            min(self.height, self.width, self.step) > 0
            and self.start < self.end <= self.height * self.width
            and self.column + (self.width - 1) * self.step < self.columns
            and (self.row + self.height) * self.columns <= prod(self.shape)
        )

    @property
    def offset(self) -> int | None:
        """Offset of the rectangle in the flattened tensor, where its elements are consecutive there."""
        consecutive = not self.transposed and self.step == 1 and (self.width == self.columns or self.height == 1)
        return self.row * self.columns + self.column if consecutive else None

    def part(self, first: int, last: int) -> "Region":
        """Return the elements `first` to `last`, counted from this region's own first."""
        return replace(self, start=self.start + first, end=self.start + last)

    def overlaps(self, other: "Region") -> bool:
        """Return whether two regions of a tensor may share elements."""
        if (starts := self._aligned(other)) is not None:
            return starts[0] < starts[1] + len(other) and starts[1] < starts[0] + len(self)
        if self.columns != other.columns:
            return True
        return all(
            one.start < another.stop and another.start < one.stop
            for one, another in zip(self._bounds(), other._bounds(), strict=True)
        )

    def copy(self, values: torch.Tensor, other: "Region", into: torch.Tensor) -> int:
        """Copy the elements that two regions of a tensor share; return their number.

        Args:
            values: [len(self)] the elements of this region.
            into: [len(other)] the elements of the other one, which are changed.
        """
        if (starts := self._aligned(other)) is not None:
            own, others = starts
            first, last = max(own, others), min(own + len(self), others + len(other))
            if last <= first:
                return 0
            _copy(into[first - others : last - others], values[first - own : last - own])
            return last - first
        places = self._places()
        row, column = places // other.columns - other.row, places % other.columns - other.column
        inside = (row >= 0) & (row < other.height) & (column >= 0) & (column % other.step == 0)
        column = column // other.step
        inside &= column < other.width
        order = column * other.height + row if other.transposed else row * other.width + column
        inside &= (order >= other.start) & (order < other.end)
        into[(order[inside] - other.start).to(into.device)] = values[inside].to(into.device, into.dtype)
        return int(inside.sum())

    def _aligned(self, other: "Region") -> tuple[int, int] | None:
        """Return the first elements of both on a scale on which both are consecutive; None where there is none."""
        if self.geometry == other.geometry:
            return self.start, other.start
        own, others = self.offset, other.offset
        return None if own is None or others is None else (own + self.start, others + other.start)

    def _places(self) -> torch.Tensor:
        """Return the places of all elements in the flattened tensor, int64 [len(self)]."""
        order = torch.arange(self.start, self.end)
        if self.transposed:
            row, column = order % self.height, order // self.height
        else:
            row, column = order // self.width, order % self.width
        return (self.row + row) * self.columns + self.column + column * self.step

    def _bounds(self) -> tuple[range, range]:
        """Return the rows and the columns of the tensor between which all elements lie."""
        length = self.height if self.transposed else self.width
        first, last = self.start // length, (self.end - 1) // length
        if self.transposed:
            rows = range(self.row, self.row + self.height)
            return rows, range(self.column + first * self.step, self.column + last * self.step + 1)
        columns = range(self.column, self.column + (self.width - 1) * self.step + 1)
        return range(self.row + first, self.row + last + 1), columns


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values, converted where number formats differ. NumPy copies in one thread; PyTorch's several would wait for
    each other where ranks share cores."""
    if into.is_cuda or values.is_cuda or into.dtype != values.dtype:
        into.copy_(values)
    else:
        np.copyto(bit_array(into), bit_array(values))
