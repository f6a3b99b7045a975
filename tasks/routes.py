"""The column of the experts that tokens were routed to, and the arrays that engines exchange."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.storage.schemas import ROUTED


def routed_column(samples: Sequence[Sequence[np.ndarray | None]]) -> pa.Array:
    """The experts of the tokens of each sample, as `cairn.storage.schemas.ROUTED` has it: null where those of one of
    its trajectories are not known.

    Args:
        samples: [tokens, layers, top-k] of each trajectory of each.
    """
    values: list[dict[str, Any] | None] = []
    for parts in samples:
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            values.append(None)
            continue
        experts = known[0] if len(known) == 1 else np.concatenate(known)
        _, layers, top_k = experts.shape
        little = experts.astype(experts.dtype.newbyteorder("<"), copy=False)
        values.append({"layers": layers, "top_k": top_k, "bytes": experts.itemsize, "experts": little.tobytes()})
    return pa.array(values, ROUTED.type)


def routes_of(value: Mapping[str, Any] | None) -> np.ndarray | None:
    """[tokens, layers, top-k] from one value of the column."""
    if value is None:
        return None
    experts = np.frombuffer(value["experts"], np.dtype(f"<u{value['bytes']}"))
    return experts.reshape(-1, value["layers"], value["top_k"])


def routed_experts(samples: pa.Table) -> list[np.ndarray | None] | None:
    """Of each sample, [tokens, layers, top-k]; None where no sample of the batch has any."""
    column = samples.column(ROUTED.name)
    return None if column.null_count == len(column) else [routes_of(value.as_py()) for value in column]
