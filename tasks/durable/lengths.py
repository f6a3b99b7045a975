"""Lengths of the responses to prompts."""

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger.schemas import Status


def mean_lengths(samples: pa.Table) -> pa.Table:
    """Return the mean response length of each prompt in rows of the rollout table. Failed samples do not count.

    Columns: prompt_index, epoch, tokens_mean.
    """
    tokens = pc.list_value_length(samples.column("response_ids"))
    table = samples.select(["prompt_index", "epoch"]).append_column("tokens", tokens)
    table = table.filter(pc.not_equal(samples.column("status"), str(Status.FAILED)))
    return table.group_by(["prompt_index", "epoch"]).aggregate([("tokens", "mean")])
