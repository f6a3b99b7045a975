import itertools

import torch

from cairn.engines.training.regions import Region
from tests.tables import cases

ROWS, COLUMNS = 6, 8
WHOLE = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
RECTANGLES = [
    (0, 0, 6, 8, 1, False),
    (0, 0, 3, 8, 1, False),
    (3, 0, 3, 8, 1, False),
    (0, 0, 6, 4, 1, False),
    (2, 4, 4, 4, 1, False),
    (1, 1, 4, 3, 2, True),
    (0, 0, 6, 4, 2, True),
    (2, 3, 1, 5, 1, False),
]
"""Row, column, height, width, step, transposed."""


def held(row: int, column: int, height: int, width: int, step: int, transposed: bool) -> torch.Tensor:
    """The elements of a rectangle in the order in which a rank holds them."""
    rectangle = WHOLE[row : row + height, column : column + (width - 1) * step + 1 : step]
    return (rectangle.T if transposed else rectangle).reshape(-1)


def region_of(rectangle: tuple[int, int, int, int, int, bool], start: int, end: int) -> Region:
    row, column, height, width, step, transposed = rectangle
    return Region("w", (ROWS, COLUMNS), COLUMNS, row, column, height, width, start, end, step, transposed)


@cases(("source", "target"), itertools.product(RECTANGLES, RECTANGLES))
def test_what_two_regions_share_is_copied_to_its_place_and_nothing_else(
    source: tuple[int, int, int, int, int, bool], target: tuple[int, int, int, int, int, bool]
) -> None:
    sources, targets = held(*source), held(*target)
    for (first, last), (start, end) in itertools.product(
        [(0, len(sources)), (1, len(sources) - 1), (2, 4)], [(0, len(targets)), (3, len(targets) - 1)]
    ):
        one, other = region_of(source, first, last), region_of(target, start, end)
        into = torch.full((end - start,), -1)
        count = one.copy(sources[first:last], other, into)
        shared = torch.isin(targets[start:end], sources[first:last])
        assert into.equal(torch.where(shared, targets[start:end], -1))
        assert count == shared.sum()
        assert one.overlaps(other) or not count


def test_a_tensor_of_three_axes_is_read_by_whoever_flattens_it_otherwise() -> None:
    by_rows = Region.rows("w", (4, 3, 2), 1, 2)
    flattened = Region("w", (4, 3, 2), 2, 3, 0, 9, 2, 0, 18)
    into = torch.zeros(12)
    values = torch.arange(6.0, 24.0)
    assert flattened.copy(values, by_rows, into) == 12
    assert into.equal(torch.arange(6.0, 18.0))
