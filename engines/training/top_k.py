"""Rows of the k most probable tokens of a model at each response token: 1 + 2k float32 values."""

from collections.abc import Sequence

import numpy as np

ABSENT = -1e30
"""Log-prob of a missing token: finite, so that its product with a probability of 0 is 0."""


def row_shape(k: int) -> tuple[int, ...]:
    """Return the shape of one token's scores: a row of `top_rows`, or for k = 0 a single log-prob."""
    return (1 + 2 * k,) if k else ()


def split_rows(rows: Sequence[np.ndarray], k: int, vocabulary: int) -> dict[str, list[np.ndarray]]:
    """Return the columns of a teacher's rows [R_i, 1 + 2k] (see `top_rows`), by their names in a `TrainBatch`.

    Shapes for each sequence: [R_i] and [R_i, k] float32, and [R_i, k] int32.

    Args:
        vocabulary: number of tokens that the tokenizer and the policy know. Models may have more outputs; those beyond
            are left out.
    """
    columns: dict[str, list[np.ndarray]] = {"teacher_log_probs": [], "teacher_top_log_probs": [], "teacher_top_ids": []}
    for row in rows:
        table = row.reshape(-1, *row_shape(k))
        ids = table[:, k + 1 :].astype(np.int32)
        unknown = ids >= vocabulary
        columns["teacher_log_probs"].append(table[:, 0])
        columns["teacher_top_log_probs"].append(np.where(unknown, np.float32(ABSENT), table[:, 1 : k + 1]))
        columns["teacher_top_ids"].append(np.where(unknown, 0, ids).astype(np.int32))
    return columns
