"""The decode loop: the library's own forward pass over our own key-value cache.

Every prompt but its last token is prefilled once and copied to the slots of its samples; then each step feeds one token
a sample. Samples that end make room at once, for waiting requests or for a smaller batch.

**Batch invariance.** A sample's tokens and log-probs depend on the weights, its prompt, its seed and its sampling
parameters only, bit for bit, because every kernel sees shapes that lead to the same arithmetic for it: prompts are
padded on the right to a length that is their own (`kv_cache.round_up`) and share a forward pass only with prompts of
that length; matrix products have `MIN_ROWS` rows at least, below which BLAS libraries turn to other kernels; attention
runs row by row over lengths that are multiples of `kv_cache.ALIGNMENT`. This is how the CPU kernels of PyTorch were
seen to behave with one thread; `TransformersEngine.check_batch_invariance` tries it where it runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from engines.errors import BadModel
from engines.models import context_length
from engines.rollout.attention import SLOT_ATTENTION
from engines.rollout.batch import Batch
from engines.rollout.kv_cache import KVCache, round_up
from engines.types import Completion, GenerateRequest

MIN_ROWS = 4
"""Rows of a step; fewer samples are filled up with padding."""

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, of one forward pass; bounds its memory."""

_Group = tuple[GenerateRequest, list[int]]
"""Samples of a request that are admitted together, by their indices."""


class Decoder:
    """Samples responses from a causal language model with attention layers, full or sliding.

    Args:
        model: in evaluation mode; its attention implementation is replaced where it is SDPA.
        max_rows: samples that run at a time.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        self.model = model
        self.max_rows = max(max_rows, MIN_ROWS)
        self.device = model.device
        self.config = model.config.get_text_config(decoder=True)
        self.context_length = context_length(model.config)
        self.vocab_size = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.running = 0
        """Samples being decoded now."""
        self._mask_kinds = _mask_kinds(self.config)
        self._arange = torch.arange(0, device=self.device)
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(SLOT_ATTENTION)
        self._cache = self._new_cache()

    def run(
        self,
        requests: Sequence[GenerateRequest],
        end_ids: frozenset[int],
        weight_version: int,
        aborted: Callable[[], bool],
    ) -> Iterator[list[Completion]]:
        """Serve valid requests in their order, yielding samples as they end; stops where `aborted` turns true.

        Raises:
            EngineError: the logits are not finite.
        """
        waiting = deque(_groups(requests, self.max_rows))
        num_samples = sum(len(indices) for _, indices in waiting)
        rows = max(min(self.max_rows, num_samples), MIN_ROWS)
        batch = Batch(requests, end_ids, rows, self.context_length, self.vocab_size, self.device)
        self._cache.reserve(rows, 0)
        try:
            while (waiting or len(batch)) and not aborted():
                self._admit(waiting, batch)
                if completions := self._step(batch, weight_version):
                    yield completions
        except Exception:
            self._cache = self._new_cache()  # stale values must stay finite
            raise
        finally:
            self.running = 0

    @torch.inference_mode()
    def _admit(self, waiting: deque[_Group], batch: Batch) -> None:
        """Start the first waiting groups that fit, whole groups only."""
        by_length: dict[int, list[_Group]] = defaultdict(list)
        free = self.max_rows - len(batch)
        while waiting and len(waiting[0][1]) <= free:
            group = waiting.popleft()
            free -= len(group[1])
            by_length[self._prefill_length(group[0])].append(group)
        for length, groups in by_length.items():
            if length == 0:
                for request, indices in groups:
                    batch.admit(request, indices)
                continue
            remaining = iter(groups)
            while chunk := list(islice(remaining, max(1, PREFILL_TOKENS // length))):
                self._prefill(chunk, length, batch)
        self.running = len(batch)

    def _prefill_length(self, request: GenerateRequest) -> int:
        """Padded length of all but the prompt's last token: a function of the prompt alone."""
        return min(round_up(len(request.prompt_ids) - 1), self.context_length)

    def _prefill(self, groups: list[_Group], length: int, batch: Batch) -> None:
        """Compute the keys and values of prompts of one padded length and hand them to the slots of their samples.

        Padding stands on the right, where causal attention cannot see it.
        """
        input_ids = torch.zeros(len(groups), length, dtype=torch.int64)
        for row, (request, _) in enumerate(groups):
            prompt = torch.as_tensor(request.prompt_ids, dtype=torch.int64)[:-1]
            input_ids[row, : len(prompt)] = prompt
        prompts = DynamicCache()
        self.model(input_ids=input_ids.to(self.device), past_key_values=prompts, use_cache=True, logits_to_keep=1)
        self._cache.reserve(0, length)
        slots = [batch.admit(request, indices) for request, indices in groups]
        sources = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(rows) for rows in slots]))
        self._cache.insert(prompts, sources.to(self.device), torch.cat(slots))

    @torch.inference_mode()
    def _step(self, batch: Batch, weight_version: int) -> list[Completion]:
        """Generate one token a sample. Returns the samples that ended."""
        size = len(batch)
        rows = max(size, MIN_ROWS)
        positions = batch.position[:rows]
        self._cache.reserve(0, batch.longest + 1)
        self._cache.begin_step(positions, batch.longest)
        output = self.model(
            input_ids=batch.token[:rows, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(positions),
            past_key_values=self._cache,
            use_cache=True,
        )
        ended = batch.advance(output.logits[:size, -1])
        if not len(ended):
            return []
        completions = batch.completions(ended, weight_version)
        sources, targets = batch.remove(ended)
        if len(sources):
            self._cache.move(sources, targets)
        self.running = len(batch)
        return completions

    def _masks(self, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, 1, L], to be added to scores: 0 for what a row has written, -inf behind it and outside its window."""
        length = self._cache.length
        if length > len(self._arange):
            self._arange = torch.arange(self._cache.capacity, device=self.device)
        keys, queries = self._arange[:length], positions[:, None]
        dtype = self.model.dtype
        masks = {}
        for kind, window in self._mask_kinds.items():
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, float("-inf"))
            masks[kind] = mask[:, None, None]
        return masks if len(masks) > 1 else mask[:, None, None]

    def _new_cache(self) -> KVCache:
        return KVCache(self.config.num_hidden_layers, self.device)


def _groups(requests: Sequence[GenerateRequest], max_rows: int) -> Iterator[_Group]:
    for request in requests:
        for first in range(0, len(request.seeds), max_rows):
            yield request, list(range(first, min(first + max_rows, len(request.seeds))))


def _mask_kinds(config: object) -> dict[str, int | None]:
    """The kinds of attention layers and their windows in tokens (None: unbounded)."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise BadModel(
            f"Model type {getattr(config, 'model_type', '?')} has layers of kind {sorted(unknown)[0]}, for which the "
            "transformers rollout engine has no cache: use a model with full or sliding attention."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
