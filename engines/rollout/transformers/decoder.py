"""The arithmetic of decoding: the library's own forward pass over our own key-value cache.

**Batch invariance.** A sample's tokens and log-probs depend on the weights, the tokens that it goes on from, its seed
and position, and its sampling parameters only, bit for bit, because every kernel sees shapes that lead to the same
arithmetic for it:
- What a sample goes on from is prefilled whole, a prompt or a conversation, and never taken from what other samples
  have decoded. It is padded on the right to a length that is its own (`kv_cache.round_up`) and shares a forward pass
  only with others of that length.
- Matrix products have `MIN_ROWS` rows at least, below which BLAS libraries turn to other kernels.
- MKL chooses kernels whose results do not depend on that number either (`MKL_CBWR`, see `engines`).
- Attention runs row by row, over lengths that are multiples of `kv_cache.ALIGNMENT`.
- Activation functions compute the last few numbers of a tensor, those that do not fill vectors, by other code. Where
  the model's widths are not multiples of `VECTORS`, padding comes last and takes that place.

This is how the CPU kernels of PyTorch were seen to behave with one thread; `TransformersEngine.check_batch_invariance`
tries it where it runs.
"""

from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cairn.engines.errors import BadModel
from cairn.engines.models import context_length
from cairn.engines.rollout.transformers.attention import SLOT_ATTENTION
from cairn.engines.rollout.transformers.decoding_step import DecodingStep, Step, record
from cairn.engines.rollout.transformers.kv_cache import KVCache, round_up

MIN_ROWS = 4
"""Rows of a step; fewer samples are filled up with padding."""

VECTORS = 32
"""Numbers that PyTorch's loops over float32 take at a time: two vectors of AVX-512."""


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
        widths = {width for parameter in model.parameters() for width in parameter.shape}
        self._padding = 1 if any(width % VECTORS for width in widths) else 0
        windows = _windows(model.config.get_text_config())
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(SLOT_ATTENTION)
        self._example = self.forward_prompts(torch.zeros(1, 1, dtype=torch.int64))
        self.cache = KVCache(self._example)
        step = DecodingStep(model, windows, self.cache.num_heads)
        self.step: Step = record(step, self.cache, self.context_length, self.vocab_size) or step

    def num_rows(self, size: int) -> int:
        """Rows of a step for so many samples, padding included."""
        return max(size + self._padding, MIN_ROWS)

    def prefill_length(self, tokens: np.ndarray) -> int:
        """Padded length of all but the last of the tokens: a function of these alone."""
        length = len(tokens) - 1
        return min(round_up(length + self._padding), self.context_length) if length else 0

    def forward_prompts(self, input_ids: torch.Tensor) -> DynamicCache:
        """Keys and values of prompts [P, S]."""
        prompts = DynamicCache()
        with torch.inference_mode():
            self.model(input_ids=input_ids.to(self.device), past_key_values=prompts, use_cache=True, logits_to_keep=1)
        return prompts

    def forget(self) -> None:
        """Give the cache up: its memory, and what a pass that broke off may have left, which need not be finite as all
        behind a slot's length must be."""
        self.cache = KVCache(self._example)


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
