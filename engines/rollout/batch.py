"""The samples that are being decoded, one row each; rows stay dense, so a step runs over a prefix of every buffer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engines.errors import EngineError
from engines.rollout.sampling import sample, uniforms
from engines.types import Completion, FinishReason, GenerateRequest


@dataclass(frozen=True)
class Sample:
    """One sample of a request, admitted at a time of `time.perf_counter`."""

    request: GenerateRequest
    index: int
    admitted: float


class Batch:
    """State of the running samples for one list of requests.

    Args:
        requests: all that will be served, already validated.
        end_ids: token ids that end every response, besides each request's own.
        max_rows: samples that run at a time.
        context_length: longest prompt and response together, in tokens.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        end_ids: frozenset[int],
        max_rows: int,
        context_length: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        params = [request.sampling_params for request in requests]
        self.samples: list[Sample] = []
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._device = device

        self._state = torch.zeros(8, max_rows, dtype=torch.int64, device=device)
        self.token, self.position, self._generated, self._limit = self._state[:4]
        self._seed, self._stop_set, self._top_k, self._greedy = self._state[4:]
        self._parameters = torch.ones(2, max_rows, device=device)
        self._temperature, self._top_p = self._parameters
        longest = min(max((p.max_new_tokens for p in params), default=0), context_length)
        self._tokens = torch.zeros(max_rows, longest, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_rows, longest, device=device)

        self._stop_sets = list(dict.fromkeys(end_ids.union(p.stop_token_ids) for p in params))
        self._stops = torch.zeros(len(self._stop_sets), vocab_size, dtype=torch.bool, device=device)
        for row, ids in enumerate(self._stop_sets):
            self._stops[row, [i for i in ids if i < vocab_size]] = True
        self._end_ids = end_ids
        self._any_greedy = any(p.temperature == 0 for p in params)
        self._any_temperature = any(p.temperature not in (0, 1) for p in params)
        self._any_truncated = any(p.top_p < 1 or 0 < p.top_k < vocab_size for p in params)
        self._truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._steps = 0
        self._farthest = 0

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def longest(self) -> int:
        """The greatest of the rows' positions."""
        return self._farthest + self._steps

    def admit(self, request: GenerateRequest, indices: Sequence[int]) -> torch.Tensor:
        """Add samples of a request whose prompt is, but for its last token, in the KV cache. Returns their rows."""
        params = request.sampling_params
        first, last = len(self), len(self) + len(indices)
        prompt_length = len(request.prompt_ids)
        self.token[first:last] = int(request.prompt_ids[-1])
        self.position[first:last] = prompt_length - 1
        self._generated[first:last] = 0
        self._limit[first:last] = min(params.max_new_tokens, self._context_length - prompt_length)
        seeds = np.array([request.seeds[i] & (2**64 - 1) for i in indices], dtype=np.uint64).view(np.int64)
        self._seed[first:last] = torch.from_numpy(seeds)
        self._stop_set[first:last] = self._stop_sets.index(self._end_ids.union(params.stop_token_ids))
        self._top_k[first:last] = params.top_k if params.top_k > 0 else self._vocab_size
        self._greedy[first:last] = params.temperature == 0
        self._temperature[first:last] = params.temperature or 1.0
        self._top_p[first:last] = params.top_p
        now = time.perf_counter()
        self.samples += [Sample(request, i, now) for i in indices]
        self._changed()
        return torch.arange(first, last, device=self._device)

    def advance(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw every row's next token from its logits [B, V]. Returns the rows that ended, ascending."""
        rows = len(self)
        generated, position = self._generated[:rows], self.position[:rows]
        tokens, log_probs = sample(
            logits.float(),
            uniforms(self._seed[:rows], generated),
            self._temperature[:rows] if self._any_temperature else None,
            self._greedy[:rows] > 0 if self._any_greedy else None,
            self._rows_truncated(),
        )
        step = generated[:, None]
        self._tokens[:rows].scatter_(1, step, tokens[:, None])
        self._log_probs[:rows].scatter_(1, step, log_probs[:, None])
        self.token[:rows] = tokens
        generated += 1
        position += 1
        self._steps += 1
        stopped = self._stops[0][tokens] if len(self._stops) == 1 else self._stops[self._stop_set[:rows], tokens]
        return (stopped | (generated >= self._limit[:rows])).nonzero()[:, 0]

    def completions(self, rows: torch.Tensor, weight_version: int) -> list[Completion]:
        """What the ended rows hold.

        Raises:
            EngineError: a log-prob is not finite.
        """
        now = time.perf_counter()
        tokens = self._tokens[rows].cpu().numpy()
        log_probs = self._log_probs[rows].cpu().numpy()
        lengths = self._generated[rows].tolist()
        stop_sets = self._stop_set[rows].tolist()
        completions = []
        for i, row in enumerate(rows.tolist()):
            admitted = self.samples[row]
            response = tokens[i, : lengths[i]].astype(np.int32)
            response_log_probs = log_probs[i, : lengths[i]].copy()
            if not np.isfinite(response_log_probs).all():
                raise EngineError(
                    f"The weights of version {weight_version} give logits that are not finite (request "
                    f"{admitted.request.request_id}): the policy has diverged; go back to an earlier checkpoint."
                )
            stopped = int(response[-1]) in self._stop_sets[stop_sets[i]]
            completions.append(
                Completion(
                    request_id=admitted.request.request_id,
                    sample_index=admitted.index,
                    response_ids=response,
                    log_probs=response_log_probs,
                    finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    weight_version=weight_version,
                    seconds=now - admitted.admitted,
                )
            )
        return completions

    def remove(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop rows and move the last ones into the holes. Returns the moved rows' (sources, targets)."""
        ended = set(rows.tolist())
        size, left = len(self), len(self) - len(ended)
        targets = [row for row in sorted(ended) if row < left]
        sources = [row for row in range(left, size) if row not in ended]
        for target, source in zip(targets, sources, strict=True):
            self.samples[target] = self.samples[source]
        del self.samples[left:]
        moved = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        if sources:
            for buffer in (self._state.T, self._parameters.T, self._tokens, self._log_probs):
                buffer.index_copy_(0, moved[1], buffer.index_select(0, moved[0]))
        self._state[:, left:size] = 0  # rows behind the last are decoded as padding, at position 0
        self._changed()
        return moved

    def _changed(self) -> None:
        """Take note that other samples run."""
        self._truncated = None
        self._steps = 0
        self._farthest = int(self.position[: len(self)].max()) if self.samples else 0

    def _rows_truncated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if not self._any_truncated:
            return None
        if self._truncated is None:
            rows = slice(0, len(self))
            truncated = (self._top_p[rows] < 1) | (self._top_k[rows] < self._vocab_size)
            index = truncated.nonzero()[:, 0]
            self._truncated = index, self._top_p[index], self._top_k[index]
        return self._truncated
