"""The samples that are decoded together: they join between two steps and leave when they end.

The tokens that a sample continues are, except the last one, prefilled once, and copied to the slots of all samples that
continue the same tokens. Then each step feeds one token to each sample. Samples that end make room at once, for those
that wait or for a smaller batch.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np
import torch

from cairn.engines.models.routing import compact
from cairn.engines.rollout.transformers.batch import Batch, Sample
from cairn.engines.rollout.transformers.decoder import Decoder
from cairn.engines.rollout.transformers.kv_cache import round_up
from cairn.engines.types.errors import GenerationFailed
from cairn.engines.types.types import Completion, FinishReason

# The number of positions that each row of a decoding step attends to: reading keys and values is most of a step's cost.
#
# A step runs over dense rows, and a kernel over one number of positions: that of the longest row. So the longest rows
# come first, as far as that pays. Kernels run over segments of the rows, and in each segment no row needs much less
# than the first. Samples end and leave holes that others fill, so the order wears off. It is restored when the
# positions read in vain since then are as many as the rows hold.
#
# A row's attention result does not depend on its segment: see `cairn.engines.rollout.transformers.kv_cache`.


WORTH = 2048
"""Positions of a row that take as long to read, in a small model, as another kernel takes to start."""


def segments_of(positions: np.ndarray) -> np.ndarray:
    """Return the segments [K, 2] of rows with their last tokens at `positions` [B]. Each segment has the row after its
    last one, and the number of positions to attend to, which decreases."""
    needed = np.maximum.accumulate(positions[::-1])[::-1] + 1
    rows, begin, segments = len(needed), 0, []
    while begin < rows:
        length = round_up(int(needed[begin]))
        end = int(np.count_nonzero(2 * needed > needed[begin]))
        if end < rows and (rows - end) * (length - round_up(int(needed[end]))) < WORTH:
            end = rows
        segments.append((end, length))
        begin = end
    return np.array(segments, np.int64)


def whole(rows: int, length: int) -> np.ndarray:
    """Return all rows as one segment."""
    return np.array([(rows, length)], np.int64)


def positions_read(segments: np.ndarray) -> int:
    """Return the number of positions that all rows read together."""
    return int(np.diff(segments[:, 0], prepend=0) @ segments[:, 1])


class RowOrder:
    """Decision on when to put rows in order."""

    def __init__(self) -> None:
        self._wasted = 0
        """Positions read since the rows were in order, beyond those that ordered rows would have read."""

    def better(self, positions: np.ndarray) -> np.ndarray | None:
        """Return the rows in a better order, longest first, when it is time for it; None otherwise."""
        if len(positions) * (int(positions.max(initial=0)) + 1) < 2 * WORTH:
            return None
        ordered = positions_read(segments_of(np.sort(positions)[::-1]))
        wasted = positions_read(segments_of(positions)) - ordered
        self._wasted += wasted
        if not wasted or self._wasted <= ordered:
            return None
        self._wasted = 0
        return np.argsort(-positions, kind="stable")


PREFILL_TOKENS = 8192
"""Most input tokens of one forward pass, padding included. Bounds its memory."""

Ended = list[tuple[Sample, Completion | GenerationFailed]]
"""Samples with their results."""


class Decoding:
    """Running and waiting samples. One thread at a time may use it, and a decoder has one of these at a time.

    Args:
        end_ids: token ids that end every response, besides each request's own.
    """

    def __init__(self, decoder: Decoder, end_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._batch = Batch(end_ids, decoder.context_length, decoder.vocab_size)
        self._order = RowOrder()
        self._waiting: deque[Sample] = deque()
        self.running_max = self.queued_max = 0
        """The most samples that were decoded, and that waited, in one step."""

    @property
    def running(self) -> int:
        """Number of samples being decoded."""
        return len(self._batch)

    @property
    def queued(self) -> int:
        """Number of samples that wait for room."""
        return len(self._waiting)

    def join(self, samples: Iterable[Sample]) -> None:
        """Have valid samples begin with the next step, or with later ones where there is no room, in order."""
        self._waiting.extend(samples)

    def leave(self, samples: Collection[Sample], weight_version: int) -> Ended:
        """End samples, and return them with what they have."""
        rows = [row for row, sample in enumerate(self._batch.samples) if sample in samples]
        ended = self._end(np.array(rows, np.int64), weight_version, aborted=True)
        unbegun = [sample for sample in self._waiting if sample in samples]
        self._waiting = deque(sample for sample in self._waiting if sample not in samples)
        return ended + [(one, Completion.empty(one.request.request_id, FinishReason.ABORT)) for one in unbegun]

    def step(self, weight_version: int) -> Ended:
        """Begin waiting samples, as far as there is room, and generate one token for each running sample. Returns what
        ended."""
        self._start_waiting()
        self.running_max = max(self.running_max, self.running)
        self.queued_max = max(self.queued_max, self.queued)
        return self._end(self._advance(), weight_version)

    @torch.inference_mode()
    def _start_waiting(self) -> None:
        """Start the first waiting samples that fit. Samples that continue equal tokens share their keys and values."""
        decoder, batch = self._decoder, self._batch
        starting = [self._waiting.popleft() for _ in range(min(len(self._waiting), decoder.max_rows - len(batch)))]
        if not starting:
            return
        running = batch.starts()
        rows = decoder.num_rows(len(batch) + len(starting))
        batch.reserve(rows, starting)
        decoder.cache.reserve(rows, 1)
        by_start: dict[bytes, list[Sample]] = defaultdict(list)
        for sample in starting:
            by_start[sample.start].append(sample)
        by_length: dict[tuple[int, bytes], list[list[Sample]]] = defaultdict(list)
        for start, group in by_start.items():
            if decoder.cache.retains_prefixes and (sibling := running.get(start)) is not None:
                for sample in group:
                    sample.shift = batch.samples[sibling].shift
                slots = batch.add(group)
                if len(group[0].tokens) > 1:  # else nothing was prefilled
                    batch.record_input_routes(slots, batch.samples[sibling].routes[:1])
                decoder.cache.move(self._put([sibling] * len(slots)), self._put(slots), len(group[0].tokens) - 1)
            else:
                alone = start if group[0].request.images else b""
                by_length[decoder.prefill_length(group[0].tokens), alone].append(group)
        for (length, _), groups in by_length.items():
            remaining = iter(groups)
            while chunk := list(islice(remaining, max(1, PREFILL_TOKENS // max(1, length)))):
                self._prefill(chunk, length)

    def _prefill(self, groups: list[list[Sample]], length: int) -> None:
        """Compute the keys and values of each group's tokens, of one padded length, and copy them to the slots of its
        samples.

        Padding is on the right, where causal attention cannot see it.
        """
        first = groups[0][0]
        if (seen := self._decoder.see(first.tokens[:-1], first.request, length)) is not None:
            for sample in groups[0]:
                sample.shift = int(seen.next_positions) - len(first.tokens) + 1
        sources, slots = [], []
        for i, group in enumerate(groups):
            slots += self._batch.add(group)
            sources += [i] * len(group)
        cache = self._decoder.cache
        if not length:
            cache.clear(self._put(slots))  # of states, which are zeros before the first token
            return
        input_ids = torch.zeros(self._decoder.prefill_rows(len(groups), length), length, dtype=torch.int64)
        for row, group in zip(input_ids, groups, strict=False):
            known = group[0].tokens[:-1]
            row[: len(known)] = torch.from_numpy(known)
        cache.reserve(0, length)
        prompts, routes = self._decoder.forward_prompts(input_ids, seen)
        cache.insert(prompts, self._put(sources), self._put(slots))
        if self._decoder.routes.layers:
            experts = compact(routes, self._decoder.routes.num_experts)
            for source, slot in zip(sources, slots, strict=True):
                self._batch.record_input_routes([slot], [experts[source, : len(self._batch.samples[slot].tokens) - 1]])

    @torch.inference_mode()
    def _advance(self) -> np.ndarray:
        """Generate one token for each sample. Returns the rows that ended."""
        decoder, batch, size = self._decoder, self._batch, len(self._batch)
        rows = decoder.num_rows(size)
        if decoder.in_segments:
            self._arrange()
        length = round_up(int(batch.positions[:size].max()) + 1)
        decoder.cache.reserve(0, length)
        tokens, positions = (
            torch.from_numpy(values[:rows]).to(decoder.device) for values in (batch.tokens, batch.positions)
        )
        key_positions = torch.arange(length, device=decoder.device)
        read = (positions + torch.from_numpy(batch.shifts[:rows]).to(decoder.device),) if decoder.sees_images else ()
        segments = torch.from_numpy(segments_of(batch.positions[:rows]) if decoder.in_segments else whole(rows, length))
        logits, routes = decoder.step(tokens, positions, key_positions, decoder.cache.stores, segments, *read)
        if decoder.routes.layers and batch.asks_for_routes:
            batch.read_routes(compact(routes[:size], decoder.routes.num_experts))
        return batch.advance(logits[:size])

    def _arrange(self) -> None:
        """Put the rows in an order in which less is read, when it is time for it."""
        batch = self._batch
        if (order := self._order.better(batch.positions[: len(batch)])) is None:
            return
        (targets,) = np.nonzero(order != np.arange(len(order)))
        sources, length = order[targets], round_up(int(batch.positions[: len(batch)].max()) + 1)
        batch.rearrange(order)
        cache = self._decoder.cache
        cache.move(self._put(sources.tolist()), self._put(targets.tolist()), min(length, cache.capacity))

    @torch.inference_mode()
    def _end(self, rows: np.ndarray, weight_version: int, *, aborted: bool = False) -> Ended:
        """Take rows out of the batch, and return their results."""
        if not len(rows):
            return []
        batch, cache = self._batch, self._decoder.cache
        length = round_up(int(batch.positions[: len(batch)].max()) + 1)
        ended = batch.results(rows, weight_version, aborted=aborted)
        failed = [row for row, (_, result) in zip(rows.tolist(), ended, strict=True) if isinstance(result, Exception)]
        if failed:
            cache.clear(self._put(failed))  # values after a slot's length must stay finite
        sources, targets = batch.remove(rows)
        if sources:
            cache.move(self._put(sources), self._put(targets), min(length, cache.capacity))
        return ended

    def _put(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices, device=self._decoder.device)
