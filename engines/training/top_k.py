"""The k most probable tokens of a model at each response token, as a row of 1 + 2k float32.

| column | |
|---|---|
| 0 | log-prob of the response token itself |
| 1 … k | log-probs of the k most probable tokens, from the most probable on |
| k + 1 … 2k | their ids, which float32 holds exactly below 2^24 |

As one row they go the way of a single log-prob, through one all-reduce and in one array a sample. All log-probs are
those of the softmax over the whole vocabulary, or over what the token was drawn from (`cairn.engines.training.kept`);
where that is less than k tokens, the others have the id 0 and the log-prob `ABSENT`, whose probability is 0.
"""

from collections.abc import Sequence

import numpy as np

ABSENT = -1e30
"""The log-prob where there is no token: finite, so that its product with a probability of 0 is 0."""


def row_shape(k: int) -> tuple[int, ...]:
    """What there is of a token: a row, or where k is 0 one number, its log-prob."""
    return (1 + 2 * k,) if k else ()


def split_rows(rows: Sequence[np.ndarray], k: int, vocabulary: int) -> dict[str, list[np.ndarray]]:
    """Columns of a teacher's rows [R_i, 1 + 2k], by their names in a `TrainBatch`: [R_i], [R_i, k] float32 and
    [R_i, k] int32 of each sequence.

    Args:
        vocabulary: tokens that the tokenizer and the policy know. Models have other numbers of outputs; what is beyond
            is left out.
    """
    found: dict[str, list[np.ndarray]] = {"teacher_log_probs": [], "teacher_top_log_probs": [], "teacher_top_ids": []}
    for given in rows:
        table = given.reshape(-1, *row_shape(k))
        ids = table[:, k + 1 :].astype(np.int32)
        unknown = ids >= vocabulary
        found["teacher_log_probs"].append(table[:, 0])
        found["teacher_top_log_probs"].append(np.where(unknown, np.float32(ABSENT), table[:, 1 : k + 1]))
        found["teacher_top_ids"].append(np.where(unknown, 0, ids).astype(np.int32))
    return found
