"""Which samples a shard's engine is given first: those of the prompts whose responses were the longest before.

An engine decodes so many samples at a time, and the others wait: a long one that begins last is waited for by all. From
the second epoch on it is known how long the responses to a prompt were, and the longest begin first (the LPT rule of
Graham, Bounds on multiprocessing timing anomalies, 1969). A prompt that is not known goes before those that are: it may
be the longest, and begun last would cost the most. No sample is another for it where the engine is batch-invariant;
elsewhere the order is part of the company that samples have anyway.

What is known lies in the driver's memory, from the rollouts that it made itself: nothing is read for it.
"""

import threading
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.trajectories import SampleRequest
from cairn.storage.schemas import Status


class ResponseLengths:
    """Tokens of the responses to each prompt, on average over its samples in the newest epoch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._means: dict[int, tuple[int, float]] = {}
        """By the prompt's row in the data: the epoch, and tokens."""

    def add(self, samples: pa.Table) -> None:
        """Rows of the rollout table; failed ones tell nothing."""
        tokens = pc.list_value_length(samples.column("response_ids"))
        table = samples.select(["prompt_index", "epoch"]).append_column("tokens", tokens)
        table = table.filter(pc.not_equal(samples.column("status"), str(Status.FAILED)))
        means = table.group_by(["prompt_index", "epoch"]).aggregate([("tokens", "mean")])
        with self._lock:
            for row in means.sort_by("epoch").to_pylist():
                if row["epoch"] >= self._means.get(row["prompt_index"], (0, 0.0))[0]:
                    self._means[row["prompt_index"]] = row["epoch"], row["tokens_mean"]

    def longest_first(self, samples: Iterable[SampleRequest], prompts: Mapping[int, int]) -> list[SampleRequest]:
        """The samples in the order in which they are to begin, those of a prompt together. `prompts`: by the group's
        id, its row in the data."""
        with self._lock:
            known = {id: self._means[row][1] for id, row in prompts.items() if row in self._means}
        return sorted(samples, key=lambda sample: -known.get(sample.group_id, float("inf")))
