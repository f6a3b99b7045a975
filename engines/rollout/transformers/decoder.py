"""The decode loop: the library's own forward pass over our own key-value cache.

Every prompt but its last token is prefilled once and copied to the slots of its samples; then each step feeds one token
a sample. Samples that end make room at once, for waiting requests or for a smaller batch.

**Batch invariance.** A sample's tokens and log-probs depend on the weights, its prompt, its seed and its sampling
parameters only, bit for bit, because every kernel sees shapes that lead to the same arithmetic for it:
- Prompts are padded on the right to a length that is their own (`kv_cache.round_up`) and share a forward pass only with
  prompts of that length.
- Matrix products have `MIN_ROWS` rows at least, below which BLAS libraries turn to other kernels.
- MKL chooses kernels whose results do not depend on that number either (`MKL_CBWR`, see `engines`).
- Attention runs row by row, over lengths that are multiples of `kv_cache.ALIGNMENT`.
- Activation functions compute the last few numbers of a tensor, those that do not fill vectors, by other code. Where
  the model's widths are not multiples of `VECTORS`, padding comes last and takes that place.

This is how the CPU kernels of PyTorch were seen to behave with one thread; `TransformersEngine.check_batch_invariance`
tries it where it runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cairn.engines.errors import BadModel
from cairn.engines.models import context_length
from cairn.engines.rollout.transformers.attention import SLOT_ATTENTION
from cairn.engines.rollout.transformers.batch import Batch, Sample, samples_of
from cairn.engines.rollout.transformers.decoding_step import DecodingStep, Step, record
from cairn.engines.rollout.transformers.kv_cache import KVCache, round_up
from cairn.engines.types import Completion, FinishReason, GenerateRequest

MIN_ROWS = 4
"""Rows of a step; fewer samples are filled up with padding."""

VECTORS = 32
"""Numbers that PyTorch's loops over float32 take at a time: two vectors of AVX-512."""

PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, of one forward pass; bounds its memory."""


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
        self.context_length = context_length(model.config)
        self.vocab_size = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.running = 0
        """Samples being decoded now."""
        widths = {width for parameter in model.parameters() for width in parameter.shape}
        self._padding = 1 if any(width % VECTORS for width in widths) else 0
        windows = _windows(model.config.get_text_config())
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(SLOT_ATTENTION)
        self._example = self._forward_prompts(torch.zeros(1, 1, dtype=torch.int64))
        self.cache = KVCache(self._example)
        step = DecodingStep(model, windows, self.cache.num_heads)
        self.step: Step = record(step, self.cache, self.context_length, self.vocab_size) or step

    def run(
        self,
        requests: Sequence[GenerateRequest],
        end_ids: frozenset[int],
        weight_version: int,
        aborted: Callable[[], bool],
    ) -> Iterator[list[Completion]]:
        """Serve valid requests in their order, yielding samples as they end. Where `aborted` turns true, what has not
        ended is yielded as far as it came, and that is all.

        Raises:
            EngineError: the logits are not finite.
        """
        waiting = deque(samples_of(requests))
        batch = Batch(end_ids, self.context_length, self.vocab_size)
        try:
            while (waiting or len(batch)) and not aborted():
                self._admit(waiting, batch)
                if completions := self._decode(batch, weight_version):
                    yield completions
            if waiting or len(batch):
                parts = batch.completions(np.arange(len(batch)), weight_version, aborted=True)
                yield parts + [Completion.empty(one.request.request_id, FinishReason.ABORT) for one in waiting]
        except Exception:
            self.cache = KVCache(self._example)  # what a slot holds behind its length must stay finite
            raise
        finally:
            self.running = 0

    def num_rows(self, size: int) -> int:
        """Rows of a step for so many samples, padding included."""
        return max(size + self._padding, MIN_ROWS)

    @torch.inference_mode()
    def _admit(self, waiting: deque[Sample], batch: Batch) -> None:
        """Start the first waiting samples that fit. Those that go on from equal tokens share their keys and values."""
        admitted = [waiting.popleft() for _ in range(min(len(waiting), self.max_rows - len(batch)))]
        if not admitted:
            return
        running = batch.starts()
        rows = self.num_rows(len(batch) + len(admitted))
        batch.reserve(rows, admitted)
        self.cache.reserve(rows, 1)
        by_start: dict[bytes, list[Sample]] = defaultdict(list)
        for sample in admitted:
            by_start[sample.start].append(sample)
        by_length: dict[int, list[list[Sample]]] = defaultdict(list)
        for start, group in by_start.items():
            if (sibling := running.get(start)) is not None:
                slots = batch.admit(group)
                self.cache.move(self._put([sibling] * len(slots)), self._put(slots), len(group[0].tokens) - 1)
            else:
                by_length[self._prefill_length(group[0].tokens)].append(group)
        for length, groups in by_length.items():
            remaining = iter(groups)
            while chunk := list(islice(remaining, max(1, PREFILL_TOKENS // max(1, length)))):
                self._prefill(chunk, length, batch)
        self.running = len(batch)

    def _prefill_length(self, tokens: np.ndarray) -> int:
        """Padded length of all but the last of the tokens: a function of these alone."""
        length = len(tokens) - 1
        return min(round_up(length + self._padding), self.context_length) if length else 0

    def _prefill(self, groups: list[list[Sample]], length: int, batch: Batch) -> None:
        """Compute the keys and values of each group's tokens, of one padded length, and hand them to the slots of its
        samples.

        Padding stands on the right, where causal attention cannot see it.
        """
        input_ids = torch.zeros(len(groups), length, dtype=torch.int64)
        sources, slots = [], []
        for i, group in enumerate(groups):
            known = group[0].tokens[:-1]
            input_ids[i, : len(known)] = torch.from_numpy(known)
            slots += batch.admit(group)
            sources += [i] * len(group)
        if not length:
            return
        self.cache.reserve(0, length)
        self.cache.insert(self._forward_prompts(input_ids), self._put(sources), self._put(slots))

    def _forward_prompts(self, input_ids: torch.Tensor) -> DynamicCache:
        """Keys and values of prompts [P, S]."""
        prompts = DynamicCache()
        with torch.inference_mode():
            self.model(input_ids=input_ids.to(self.device), past_key_values=prompts, use_cache=True, logits_to_keep=1)
        return prompts

    @torch.inference_mode()
    def _decode(self, batch: Batch, weight_version: int) -> list[Completion]:
        """Generate one token a sample. Returns the samples that ended."""
        size = len(batch)
        rows = self.num_rows(size)
        length = round_up(int(batch.positions[:size].max()) + 1)
        self.cache.reserve(0, length)
        tokens, positions = (
            torch.from_numpy(values[:rows]).to(self.device) for values in (batch.tokens, batch.positions)
        )
        key_positions = torch.arange(length, device=self.device)
        logits = self.step(tokens, positions, key_positions, self.cache.stores)
        ended = batch.advance(logits[:size])
        if not len(ended):
            return []
        completions = batch.completions(ended, weight_version)
        sources, targets = batch.remove(ended)
        if sources:
            self.cache.move(self._put(sources), self._put(targets), length)
        self.running = len(batch)
        return completions

    def _put(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices, device=self.device)


def _windows(config: object) -> dict[str, int | None]:
    """The kinds of attention layers and their sliding windows in tokens (None: unbounded)."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise BadModel(
            f"Model type {getattr(config, 'model_type', '?')} has layers of kind {sorted(unknown)[0]}, for which the "
            "transformers rollout engine has no cache: use a model with full or sliding attention."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
