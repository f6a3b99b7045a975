"""The samples that are being decoded, one row each, stored on the host.

Rows stay dense, so that a step runs over the first rows of all arrays.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cairn.engines.models.tokenizers import load_tokenizer
from cairn.engines.types.errors import BadModel, GenerationFailed
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingSupport

# Sampling of the next token: one uniform number for each token, from the sample's seed and the token's position alone.


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return [B] float32 in (0, 1], multiples of 2^-24: output `positions[b]` of the generator SplitMix64 seeded
    `seeds[b]`.

    The generator is counter-based: any output is available without those before it. It uses integers only, so outputs
    are equal everywhere and in every batch. Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014.

    Args:
        seeds: [B] uint64.
        positions: [B] uint64, of the token within its response, from 0.
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)) + np.uint64(1)).astype(np.float32) * np.float32(2**-24)


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw one token for each row by inverting the cumulative distribution. Returns its log-prob under that
    distribution too.

    Each row's result depends on that row alone.

    Args:
        logits: [B, V] float32.
        uniform: [B] in (0, 1].
        temperature: [B], positive; None where all are 1.
        greedy: [B] bool, rows that take the most probable token; None where no row does.
        truncated: (rows [R], top_p [R], top_k [R]) of the rows, none of them greedy, that draw from a part of the
            vocabulary only; with a top_k of V all tokens remain.

    Returns:
        tokens [B] int64; log-probs [B] float32 under softmax(logits / temperature), in truncated rows within their
        sampling support alone; and that support [R, V] bool, the tokens that these rows could have drawn.
    """
    if temperature is not None:
        logits = logits / temperature[:, None]
    probs = torch.softmax(logits, dim=-1)
    candidates = probs
    if truncated is not None:
        rows, top_p, top_k = truncated
        part = _truncate(probs[rows], top_p, top_k)
        candidates = probs.index_copy(0, rows, part)
    cumulative = candidates.cumsum(-1)
    # A target in (0, total] is first reached at a token of positive probability.
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target).clamp_(max=logits.shape[-1] - 1)  # beyond the end if not finite
    if greedy is not None:
        tokens = torch.where(greedy[:, None], probs.argmax(-1, keepdim=True), tokens)
    chosen = probs.gather(1, tokens)[:, 0]
    if truncated is None:
        return tokens[:, 0], chosen.log(), None
    chosen = chosen.index_copy(0, rows, chosen[rows] / cumulative[rows, -1])
    return tokens[:, 0], chosen.log(), part > 0


def _truncate(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all tokens except the `top_k` most probable. Also zero all except the smallest set of the most probable
    tokens that holds `top_p` of the mass of the full distribution (Holtzman et al. 2020, "The curious case of neural
    text degeneration", section 3.1)."""
    descending, order = probs.sort(dim=-1, descending=True, stable=True)
    before = descending.cumsum(-1) - descending
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & (rank < top_k[:, None])
    return torch.zeros_like(probs).scatter_(1, order, descending * keep)


# Stop strings: a response ends as soon as its text contains one.
#
# The text is the decoding of all tokens, special ones included, by the model folder's tokenizer, as in SGLang. A string
# may begin and end in the middle of tokens, and a character may take several tokens. Only the end of a response is
# decoded: each token that has a text has at least one byte of it, so a string that the last token completes is in as
# many of the last tokens as it has bytes. The result depends on the response alone.


_CHARACTER = 4
"""Most bytes of a character in UTF-8, so also its most tokens."""
_PART = "\ufffd"
"""Text that a part of a character is decoded to."""


class StopStrings:
    """Stop strings of an engine's requests. The tokenizer is loaded when a request has some.

    Args:
        folder: model folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._texts: dict[int, bool] = {}

    def watch(self, request: GenerateRequest) -> "StopWatch | None":
        """Return a watch for the request's stop strings; None where it has none. Raises BadModel."""
        strings = request.sampling_params.stop
        if not strings:
            return None
        _ = self._tokenizer  # an error concerns this request alone
        watch = StopWatch(self, strings)
        drawn = len(request.input_ids) - request.position
        for token in request.input_ids[drawn:][-watch.reach :]:
            watch.extend(int(token))
        return watch

    def text(self, tokens: list[int]) -> str:
        """Return the text of some tokens."""
        return str(self._tokenizer.decode(tokens))

    def has_text(self, token: int) -> bool:
        """Return whether a token has a text, whatever its neighbours are. An id that the tokenizer lacks has none. Some
        tokenizers drop a space before the first token, so this decodes the token twice in a row."""
        if token not in self._texts:
            self._texts[token] = bool(self.text([token, token]))
        return self._texts[token]

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return load_tokenizer(self._folder)
        except BadModel as error:
            raise BadModel(f"{error}. Stop strings need it") from error


class StopWatch:
    """A watch for stop strings at the end of one response."""

    def __init__(self, vocabulary: StopStrings, strings: tuple[str, ...]) -> None:
        self._vocabulary = vocabulary
        self._strings = strings
        self.reach = _CHARACTER + max(len(string.encode()) for string in strings)
        """Number of tokens that are decoded. It is more than a string can occupy, because the first token may lose a
        space. The first token may also begin in the middle of a character, which some tokenizers drop with all the
        bytes after it."""
        self._last: deque[int] = deque(maxlen=self.reach)
        self.completed = False
        """Whether the last token has completed a string."""

    def extend(self, token: int) -> None:
        """Append a token."""
        if self._vocabulary.has_text(token):
            self._last.append(token)

    def completes(self, token: int) -> bool:
        """Append a token. Returns whether it completes a string."""
        self.extend(token)
        tokens = [*self._last]
        for start in range(_CHARACTER):
            text = self._vocabulary.text(tokens[start:])
            self.completed = any(string in text for string in self._strings)
            if self.completed or not text.startswith(_PART):
                break
        return self.completed


@dataclass(eq=False)
class Sample:
    """A request on its way to a completion."""

    request: GenerateRequest
    tokens: np.ndarray
    """[L] int64: the tokens that the sample continues."""
    start: bytes
    """Key of these tokens and of the images among them. Samples with equal keys have equal keys and values to begin
    with."""
    watch: StopWatch | None = None
    """Watch for the stop strings that end the sample; None where it has none."""
    shift: int = 0
    """Number to add to the index of a token after the images to get its position: an image takes more indices than
    positions."""
    began: float = 0.0
    """Time at which the sample joined the batch, by `time.perf_counter`."""
    support: list[np.ndarray] = field(default_factory=list)
    """Sampling support of each generated token, where requested."""
    part: Completion | None = None
    """The sample's completion so far when it was last retracted. `tokens` ends with its tokens."""
    routes: list[np.ndarray] = field(default_factory=list)
    """[T, layers, top-k]: experts of tokens that the model has read. With a mixture of experts these are those of the
    prefill, and, where requested, those of the further tokens one by one."""

    @property
    def limit(self) -> int:
        """Most tokens that the sample may request."""
        return self.request.sampling_params.max_new_tokens - self.request.position


def samples_of(
    requests: Sequence[GenerateRequest], watch: Callable[[GenerateRequest], StopWatch | None] = lambda request: None
) -> list[Sample]:
    """Return the samples of valid requests, in order. `watch` returns the watch for a request's stop strings."""
    seen: dict[tuple[int, ...], tuple[np.ndarray, bytes]] = {}
    samples = []
    for request in requests:
        key = (id(request.input_ids), *map(id, request.images))
        shared = seen.get(key)
        if shared is None:
            tokens = np.asarray(request.input_ids, np.int64)
            images = repr([image.key for image in request.images]).encode() if request.images else b""
            shared = seen[key] = tokens, tokens.tobytes() + images
        tokens, start = shared
        samples.append(Sample(request, tokens, start, watch(request)))
    return samples


class Batch:
    """State of the running samples, which join and leave.

    Args:
        end_ids: token ids that end every response, besides each request's own.
        context_length: longest input and response together, in tokens.
        vocab_size: width of the logits.
    """

    def __init__(self, end_ids: frozenset[int], context_length: int, vocab_size: int) -> None:
        self.samples: list[Sample] = []
        """Samples, by row."""
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self.tokens = np.zeros(0, dtype=np.int64)
        """Last token of each row."""
        self.positions = np.zeros(0, dtype=np.int64)
        """Position of each row's last token in input and response. After the running rows, tokens and positions are
        0."""
        self.shifts = np.zeros(0, dtype=np.int64)
        """`Sample.shift` of each row."""
        self._generated = np.zeros(0, dtype=np.int64)
        self._continued = np.zeros(0, dtype=np.int64)
        self._limits = np.zeros(0, dtype=np.int64)
        self._seeds = np.zeros(0, dtype=np.uint64)
        self._temperatures = np.ones(0, dtype=np.float32)
        self._top_ps = np.ones(0, dtype=np.float32)
        self._top_ks = np.zeros(0, dtype=np.int64)
        self._responses = np.zeros((0, 0), dtype=np.int32)
        self._log_probs = np.zeros((0, 0), dtype=np.float32)
        self._stop_sets = np.zeros(0, dtype=np.int64)
        self._stop_rows: dict[tuple[int, ...], int] = {}
        self._stops = np.zeros((0, self._vocab_size), dtype=bool)
        self._any_greedy = self._any_temperature = self._any_truncated = self._any_watched = False

    def __len__(self) -> int:
        return len(self.samples)

    def starts(self) -> dict[bytes, int]:
        """Return the `start` of every running sample, with a row that runs it."""
        return {sample.start: row for row, sample in enumerate(self.samples)}

    def reserve(self, num_rows: int, samples: Sequence[Sample]) -> None:
        """Make room for `num_rows` rows, padding included, and for the responses of the samples."""
        rows, width = self._responses.shape
        longest = min(max(sample.limit for sample in samples), self._context_length)
        if longest > width:
            width = max(longest, min(2 * width, self._context_length))
            self._responses, self._log_probs = (
                _grown(array, rows, width) for array in (self._responses, self._log_probs)
            )
        if num_rows > rows:
            self._grow(max(num_rows, 2 * rows))

    def add(self, samples: Sequence[Sample]) -> list[int]:
        """Add samples whose tokens, except the last one, are in the KV cache. Returns their rows."""
        rows = slice(len(self), len(self) + len(samples))
        params = [sample.request.sampling_params for sample in samples]
        input_lengths = np.array([len(sample.tokens) for sample in samples])
        self.tokens[rows] = [sample.tokens[-1] for sample in samples]
        self.positions[rows] = input_lengths - 1
        self.shifts[rows] = [sample.shift for sample in samples]
        self._generated[rows] = 0
        self._continued[rows] = [sample.request.position for sample in samples]
        self._limits[rows] = np.minimum([sample.limit for sample in samples], self._context_length - input_lengths)
        self._seeds[rows] = [sample.request.seed & (2**64 - 1) for sample in samples]
        self._temperatures[rows] = [p.temperature for p in params]
        self._top_ps[rows] = [p.top_p for p in params]
        self._top_ks[rows] = [p.top_k if 0 < p.top_k < self._vocab_size else self._vocab_size for p in params]
        self._stop_sets[rows] = [self._stop_set(p.stop_token_ids) for p in params]
        self._any_greedy |= any(p.temperature == 0 for p in params)
        self._any_temperature |= any(p.temperature not in (0, 1) for p in params)
        self._any_truncated |= any(p.top_p < 1 or 0 < p.top_k < self._vocab_size for p in params)
        self._any_watched |= any(sample.watch is not None for sample in samples)
        now = time.perf_counter()
        for one in samples:
            one.began = now
        self.samples += samples
        return list(range(rows.start, rows.stop))

    @property
    def asks_for_routes(self) -> bool:
        """Whether a sample requests the experts of its tokens."""
        return any(sample.request.sampling_params.return_routed_experts for sample in self.samples)

    def record_input_routes(self, rows: Sequence[int], routes: Sequence[np.ndarray]) -> None:
        """Record the experts of the tokens that the samples continue, except the last one."""
        for row in rows:
            self.samples[row].routes += routes

    def read_routes(self, routes: np.ndarray) -> None:
        """Record the experts [B, layers, top-k] of every row's last token, for the samples that request them."""
        for row, experts in zip(self.samples, routes, strict=True):
            if row.request.sampling_params.return_routed_experts:
                row.routes.append(experts[None])

    def advance(self, logits: torch.Tensor) -> np.ndarray:
        """Draw every row's next token from its logits [B, V]. Returns the rows that ended, ascending."""
        rows = len(self)
        generated = self._generated[:rows]
        uniform, divisors, greedy, truncated = self._sampling_inputs(logits.device)
        drawn, chosen, part = sample(logits.float(), uniform, divisors, greedy, truncated)
        tokens, log_probs = drawn.cpu().numpy(), chosen.cpu().numpy()
        if truncated is not None and part is not None:
            self._record_support(truncated[0], part)
        self._responses[np.arange(rows), generated] = tokens
        self._log_probs[np.arange(rows), generated] = log_probs
        self.tokens[:rows] = tokens
        self.positions[:rows] += 1
        generated += 1
        ended = self._stops[self._stop_sets[:rows], tokens] | (generated >= self._limits[:rows])
        if self._any_watched:
            watches = [sample.watch for sample in self.samples]
            ended |= [
                watch is not None and watch.completes(int(token)) for watch, token in zip(watches, tokens, strict=True)
            ]
        return np.flatnonzero(ended)

    def results(
        self, rows: np.ndarray, weight_version: int, *, aborted: bool = False
    ) -> list[tuple[Sample, Completion | GenerationFailed]]:
        """Return the results of rows that have ended or are aborted: failures where a log-prob is not finite."""
        now = time.perf_counter()
        return [self._result(row, weight_version, aborted, now) for row in rows]

    def _result(
        self, row: int, weight_version: int, aborted: bool, now: float
    ) -> tuple[Sample, Completion | GenerationFailed]:
        ended = self.samples[row]
        id = ended.request.request_id
        log_probs = self._log_probs[row, : self._generated[row]].copy()
        if not np.isfinite(log_probs).all():
            return ended, GenerationFailed(
                f"The weights of version {weight_version} give logits that are not finite (request "
                f"{'/'.join(map(str, id))}): the policy has diverged; go back to an earlier checkpoint."
            )
        completed = ended.watch is not None and ended.watch.completed
        wants_routes = ended.request.sampling_params.return_routed_experts
        stopped = completed or self._stops[self._stop_sets[row], self.tokens[row]]
        return ended, Completion(
            request_id=id,
            response_ids=self._responses[row, : self._generated[row]].copy(),
            log_probs=log_probs,
            weight_versions=np.full(len(log_probs), weight_version, np.int32),
            finish_reason=FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH,
            seconds=now - ended.began,
            kept=SamplingSupport.of(ended.support) if ended.support else None,
            routed_experts=np.concatenate(ended.routes) if wants_routes and ended.routes else None,
        )

    def remove(self, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """Drop rows and move the last ones into the holes. Returns the moved rows' (sources, targets)."""
        ended = set(rows.tolist())
        size, left = len(self), len(self) - len(ended)
        targets = [row for row in sorted(ended) if row < left]
        sources = [row for row in range(left, size) if row not in ended]
        for target, source in zip(targets, sources, strict=True):
            self.samples[target] = self.samples[source]
        del self.samples[left:]
        if sources:
            for values in self._row_values():
                values[targets] = values[sources]
        self.tokens[left:size] = 0
        self.positions[left:size] = 0
        self.shifts[left:size] = 0
        return sources, targets

    def rearrange(self, order: np.ndarray) -> None:
        """Put the rows in another order: place i gets the row `order[i]`, `order` [B]."""
        self.samples = [self.samples[row] for row in order]
        for values in self._row_values():
            values[: len(order)] = values[order]

    def _record_support(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        """Record the sampling support `part` [R, V] of `rows` [R], for the samples that request it."""
        counts, ids = part.sum(1).cpu().numpy(), part.nonzero()[:, 1].int().cpu().numpy()
        for row, support in zip(rows.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            sample = self.samples[row]
            if sample.request.sampling_params.return_sampling_support:
                sample.support.append(support)

    def _stop_set(self, stop_token_ids: tuple[int, ...]) -> int:
        """Return the row of `_stops` for samples that these tokens end too."""
        row = self._stop_rows.get(stop_token_ids)
        if row is None:
            row = self._stop_rows[stop_token_ids] = len(self._stops)
            self._stops = _grown(self._stops, row + 1, self._vocab_size)
            self._stops[row, [i for i in self._end_ids.union(stop_token_ids) if i < self._vocab_size]] = True
        return row

    def _row_values(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in _ROW_VALUES]

    def _grow(self, num_rows: int) -> None:
        for name in _ROW_VALUES:
            array = getattr(self, name)
            setattr(self, name, _grown(array, num_rows, *array.shape[1:]))

    def _sampling_inputs(
        self, device: torch.device
    ) -> tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ]:
        """Return the arguments of `sample` after the logits."""

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        rows = len(self)
        temperatures, top_ps, top_ks = self._temperatures[:rows], self._top_ps[:rows], self._top_ks[:rows]
        places = (self._continued[:rows] + self._generated[:rows]).astype(np.uint64)
        uniform = put(uniforms(self._seeds[:rows], places))
        greedy = put(temperatures == 0) if self._any_greedy else None
        divisors = put(np.where(temperatures == 0, np.float32(1), temperatures)) if self._any_temperature else None
        truncated = None
        if self._any_truncated:
            part = np.flatnonzero((temperatures > 0) & ((top_ps < 1) | (top_ks < self._vocab_size)))
            if len(part):
                truncated = put(part), put(top_ps[part]), put(top_ks[part])
        return uniform, divisors, greedy, truncated


_ROW_VALUES = (
    "tokens",
    "positions",
    "shifts",
    "_generated",
    "_continued",
    "_limits",
    "_seeds",
    "_temperatures",
    "_top_ps",
    "_top_ks",
    "_stop_sets",
    "_responses",
    "_log_probs",
)


def _grown(array: np.ndarray, *shape: int) -> np.ndarray:
    """Return the array, enlarged to `shape` with zeros after its content."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
