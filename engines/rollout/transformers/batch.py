"""The samples that are being decoded, one row each, kept on the host.

Rows stay dense, so that a step runs over the first ones of everything.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cairn.engines.errors import GenerationFailed
from cairn.engines.rollout.transformers.sampling import sample, uniforms
from cairn.engines.types import Completion, FinishReason, GenerateRequest, KeptTokens


@dataclass(frozen=True)
class Start:
    """Samples of a request that begin after the same tokens."""

    request: GenerateRequest
    indices: Sequence[int]
    tokens: Sequence[int]
    """The prompt, and the prefix where a sample is continued; one object for all samples that share it."""

    @classmethod
    def of(cls, request: GenerateRequest) -> "list[Start]":
        """All samples of a request: together, or each on its own where they are continued."""
        if request.prefixes:
            return [
                cls(request, [index], [*request.prompt_ids, *prefix]) for index, prefix in enumerate(request.prefixes)
            ]
        return [cls(request, range(len(request.seeds)), request.prompt_ids)] if request.seeds else []

    def split(self, size: int) -> "tuple[Start, Start]":
        """The first `size` samples and the others."""
        first, others = self.indices[:size], self.indices[size:]
        return Start(self.request, first, self.tokens), Start(self.request, others, self.tokens)

    def aborted(self) -> list[Completion]:
        """What becomes of samples that were never admitted."""
        return [Completion.empty(self.request.request_id, index, FinishReason.ABORT) for index in self.indices]


@dataclass(frozen=True)
class _Sample:
    """One sample of a request, admitted at a time of `time.perf_counter`."""

    start: Start
    index: int
    admitted: float
    kept: list[np.ndarray] = field(default_factory=list)
    """Of each token generated, the ids that it was drawn from, where they are asked for."""


class Batch:
    """State of the running samples for one list of requests.

    Args:
        requests: all that will be served, already validated.
        end_ids: token ids that end every response, besides each request's own.
        num_rows: samples that run at a time.
        context_length: longest prompt and response together, in tokens.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        end_ids: frozenset[int],
        num_rows: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        params = [request.sampling_params for request in requests]
        self._samples: list[_Sample] = []
        self._context_length = context_length
        self._vocab_size = vocab_size
        self.tokens = np.zeros(num_rows, dtype=np.int64)
        """Last token of each row."""
        self.positions = np.zeros(num_rows, dtype=np.int64)
        """Its position in prompt and response; behind the running rows both are 0."""
        self._generated = np.zeros(num_rows, dtype=np.int64)
        self._continued = np.zeros(num_rows, dtype=np.int64)
        self._limits = np.zeros(num_rows, dtype=np.int64)
        self._seeds = np.zeros(num_rows, dtype=np.uint64)
        self._temperatures = np.ones(num_rows, dtype=np.float32)
        self._top_ps = np.ones(num_rows, dtype=np.float32)
        self._top_ks = np.zeros(num_rows, dtype=np.int64)
        longest = min(max((p.max_new_tokens for p in params), default=0), context_length)
        self._responses = np.zeros((num_rows, longest), dtype=np.int32)
        self._log_probs = np.zeros((num_rows, longest), dtype=np.float32)

        stop_sets = {frozenset(p.stop_token_ids) | end_ids for p in params}
        self._stop_rows = {ids: row for row, ids in enumerate(stop_sets)}
        self._end_ids = end_ids
        self._stop_sets = np.zeros(num_rows, dtype=np.int64)
        self._stops = np.zeros((len(stop_sets), vocab_size), dtype=bool)
        for ids, row in self._stop_rows.items():
            self._stops[row, [i for i in ids if i < vocab_size]] = True
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._any_temperature = any(p.temperature not in (0, 1) for p in params)
        self._any_truncated = any(p.top_p < 1 or 0 < p.top_k < vocab_size for p in params)

    def __len__(self) -> int:
        return len(self._samples)

    def find(self, start: Start) -> int | None:
        """A row that runs a sample which began after the same tokens."""
        return next((row for row, sample in enumerate(self._samples) if sample.start.tokens is start.tokens), None)

    def admit(self, start: Start) -> list[int]:
        """Add samples whose tokens are, but for the last one, in the KV cache. Returns their rows."""
        params = start.request.sampling_params
        continued = len(start.tokens) - len(start.request.prompt_ids)
        rows = slice(len(self), len(self) + len(start.indices))
        self.tokens[rows] = start.tokens[-1]
        self.positions[rows] = len(start.tokens) - 1
        self._generated[rows] = 0
        self._continued[rows] = continued
        self._limits[rows] = min(params.max_new_tokens - continued, self._context_length - len(start.tokens))
        self._seeds[rows] = [start.request.seeds[i] & (2**64 - 1) for i in start.indices]
        self._temperatures[rows] = params.temperature
        self._top_ps[rows] = params.top_p
        self._top_ks[rows] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._stop_sets[rows] = self._stop_rows[frozenset(params.stop_token_ids) | self._end_ids]
        now = time.perf_counter()
        self._samples += [_Sample(start, i, now) for i in start.indices]
        return list(range(rows.start, rows.stop))

    def advance(self, logits: torch.Tensor) -> np.ndarray:
        """Draw every row's next token from its logits [B, V]. Returns the rows that ended, ascending."""
        rows = len(self)
        generated = self._generated[:rows]
        uniform, divisors, greedy, truncated = self._sampling_inputs(logits.device)
        drawn, chosen, part = sample(logits.float(), uniform, divisors, greedy, truncated)
        tokens, log_probs = drawn.cpu().numpy(), chosen.cpu().numpy()
        if truncated is not None and part is not None:
            self._keep(truncated[0], part)
        self._responses[np.arange(rows), generated] = tokens
        self._log_probs[np.arange(rows), generated] = log_probs
        self.tokens[:rows] = tokens
        self.positions[:rows] += 1
        generated += 1
        return np.flatnonzero(self._stops[self._stop_sets[:rows], tokens] | (generated >= self._limits[:rows]))

    def completions(self, rows: np.ndarray, weight_version: int, *, aborted: bool = False) -> list[Completion]:
        """What the rows hold, which have ended or are aborted.

        Raises:
            GenerationFailed: a log-prob is not finite.
        """
        now = time.perf_counter()
        completions = []
        for row in rows:
            ended = self._samples[row]
            request = ended.start.request
            log_probs = self._log_probs[row, : self._generated[row]].copy()
            if not np.isfinite(log_probs).all():
                raise GenerationFailed(
                    f"The weights of version {weight_version} give logits that are not finite (request "
                    f"{request.request_id}): the policy has diverged; go back to an earlier checkpoint."
                )
            stopped = self._stops[self._stop_sets[row], self.tokens[row]]
            reason = FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
            completions.append(
                Completion(
                    request_id=request.request_id,
                    sample_index=ended.index,
                    response_ids=self._responses[row, : self._generated[row]].copy(),
                    log_probs=log_probs,
                    weight_versions=np.full(len(log_probs), weight_version, np.int32),
                    finish_reason=reason,
                    seconds=now - ended.admitted,
                    kept=KeptTokens.of(ended.kept) if ended.kept else None,
                )
            )
        return completions

    def remove(self, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """Drop rows and move the last ones into the holes. Returns the moved rows' (sources, targets)."""
        ended = set(rows.tolist())
        size, left = len(self), len(self) - len(ended)
        targets = [row for row in sorted(ended) if row < left]
        sources = [row for row in range(left, size) if row not in ended]
        for target, source in zip(targets, sources, strict=True):
            self._samples[target] = self._samples[source]
        del self._samples[left:]
        if sources:
            for values in self._row_values():
                values[targets] = values[sources]
        self.tokens[left:size] = 0
        self.positions[left:size] = 0
        return sources, targets

    def _keep(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        """Note what rows [R] could have drawn, part [R, V], for the samples that are asked for it."""
        counts, ids = part.sum(1).cpu().numpy(), part.nonzero()[:, 1].int().cpu().numpy()
        for row, kept in zip(rows.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            sample = self._samples[row]
            if sample.start.request.sampling_params.return_kept:
                sample.kept.append(kept)

    def _row_values(self) -> tuple[np.ndarray, ...]:
        return (
            self.tokens,
            self.positions,
            self._generated,
            self._continued,
            self._limits,
            self._seeds,
            self._temperatures,
            self._top_ps,
            self._top_ks,
            self._stop_sets,
            self._responses,
            self._log_probs,
        )

    def _sampling_inputs(
        self, device: torch.device
    ) -> tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ]:
        """What `sample` takes after the logits."""

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
