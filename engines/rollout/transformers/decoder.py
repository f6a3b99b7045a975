"""The arithmetic of decoding: the library's own forward pass over Cairn's own key-value cache.

**Batch invariance.** A sample's tokens and log-probs depend, bit for bit, only on the weights, the tokens that it
continues, its seed and position, and its sampling parameters. Every kernel sees shapes that lead to the same arithmetic
for the sample:
- The tokens that a sample continues, a prompt or a conversation, are prefilled whole, and never taken from what other
  samples have decoded. They are padded on the right to a length of their own (`kv_cache.round_up`), and share a forward
  pass only with others of that length. Tokens with images share it with no others. Where layers keep a state, padding
  would enter it, so there is none; instead the pass has prompts of padding, so that it has as many rows as a step.
- Matrix products have at least `MIN_ROWS` rows, below which BLAS libraries switch to other kernels.
- MKL chooses kernels whose results do not depend on that number either (`MKL_CBWR`, see `engines`).
- Attention runs row by row, over lengths that are multiples of `kv_cache.ALIGNMENT`.
- Activation functions compute the last few numbers of a tensor, those that do not fill vectors, by other code. Where
  the model's widths are not multiples of `VECTORS`, padding comes last, as many rows as such a vector may span.

The CPU kernels of PyTorch were observed to behave this way with one thread. `TransformersEngine.check_batch_invariance`
tests it on the machine where it runs.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from cairn.engines.models.folders import context_length, sees_images
from cairn.engines.models.routing import RouteRecorder
from cairn.engines.rollout.requests import sees_no_images
from cairn.engines.rollout.transformers.kv_cache import (
    ALIGNMENT,
    COMPRESSED,
    COMPRESSED_ATTENTION,
    KINDS,
    SLOT_ATTENTION,
    KVCache,
    Layer,
    StepCache,
    kinds_of,
    prompt_cache,
    round_up,
    segmented,
)
from cairn.engines.types.errors import BadModel
from cairn.engines.types.types import GenerateRequest

if TYPE_CHECKING:
    from cairn.engines.models.vision import ImageInputs


# One decoding step as a function of tensors: the model's own forward pass, and its recording.
#
# Small steps are bound by the Python of the model's modules, not by arithmetic. The recording (TorchScript, `trace`)
# replays the same kernels in the same order without that Python. It returns the same logits, bit for bit, of any
# architecture. It is used where it has proved faithful, as `record` describes; elsewhere the model's Python runs.


StepInputs = tuple[Any, ...]
"""Arguments of a `Step`."""

StepOutputs = tuple[torch.Tensor, torch.Tensor]
"""Logits [B, V], and the experts [B, layers, top-k] that were chosen for the tokens, without layers that have no
experts."""

Step = Callable[..., StepOutputs]
"""(tokens [B], positions [B], key_positions [L], stores, segments [K, 2]) -> outputs. Feeds a token to each of the
slots 0 … B - 1 of a `KVCache` at its position, which extends the slot. The token attends to the slot's positions: to
the first L, or to fewer as `segments` says (`cairn.engines.rollout.transformers.decoding`). For a model that sees
images it takes a sixth argument, [B]: the positions that the model reads; `positions` are then those in the slots."""


class DecodingStep(torch.nn.Module):
    """A `Step` that runs the model.

    Args:
        model: any causal language model whose layers are of `kv_cache.KINDS`.
        windows: kind of attention layer, as in `config.layer_types` -> its sliding window in tokens, or None.
        layers: layers as in `KVCache.layers`.
        routes: records the experts that the model chooses.
    """

    def __init__(
        self, model: PreTrainedModel, windows: dict[str, int | None], layers: Sequence[Layer], routes: RouteRecorder
    ) -> None:
        super().__init__()
        self.model = model
        self.routes = routes
        self.windows = windows
        self.layers = layers

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        key_positions: torch.Tensor,
        stores: list[torch.Tensor],
        segments: torch.Tensor,
        read_positions: torch.Tensor | None = None,
    ) -> StepOutputs:
        with segmented(segments):
            output = self.model(
                input_ids=tokens[:, None],
                position_ids=(positions if read_positions is None else read_positions)[:, None],
                attention_mask=self._masks(positions, key_positions),
                past_key_values=StepCache(stores, self.layers, positions, key_positions.shape[0]),
                use_cache=True,
            )
        return output.logits[:, -1], self.routes.take()

    def _masks(self, positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return masks [B, 1, 1, L] to be added to scores: -inf after a row's position and outside its window."""
        masks = {}
        for kind, window in self.windows.items():
            unseen = key_positions > positions[:, None]
            if window is not None:
                unseen = unseen | (key_positions <= positions[:, None] - window)
            mask = torch.zeros_like(unseen, dtype=self.model.dtype).masked_fill_(unseen, float("-inf"))
            masks[kind] = mask[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


@torch.no_grad()
def record(step: DecodingStep, cache: KVCache, context_length: int, vocab_size: int) -> Step | None:
    """Return a recording of `step`; None where it would not be faithful.

    A recording is not faithful where the model's Python looks at the values of tensors (mixtures of experts that loop
    over them, position encodings that change with the length), or where the logits of any trial shape differ in a bit.

    Args:
        cache: provides the layers' shapes; it is not changed.
    """
    trials = [
        trial_inputs(cache, rows, length, context_length, vocab_size) for rows, length in ((5, 2), (4, 1), (9, 4))
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            recording = torch.jit.trace(step, _copy(trials[0]), check_trace=False)
        except RuntimeError:  # TorchScript has no such operation, or takes other arguments for it
            return None
    if any(issubclass(warning.category, torch.jit.TracerWarning) for warning in caught):
        return None
    torch._C._jit_pass_inline(recording.graph)  # no calls of modules: they take a tenth of a small model's time

    def replay(*inputs: Any) -> StepOutputs:
        with torch.jit.optimized_execution(False):  # no fusion: it would change the arithmetic
            return recording(*inputs)

    for inputs in trials:
        copies = _copy(inputs), _copy(inputs)
        outputs = step(*copies[0]), replay(*copies[1])
        pairs = zip((*outputs[0], *copies[0][3]), (*outputs[1], *copies[1][3]), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            return None
    return replay


def trial_inputs(
    cache: KVCache, rows: int, blocks: int, context_length: int, vocab_size: int, sees_images: bool = False
) -> StepInputs:
    """Return random inputs of a step over `blocks` times `ALIGNMENT` positions. `sees_images`: whether the model
    does."""
    device = cache.stores[0].device
    draw = torch.Generator().manual_seed(rows)
    length = blocks * ALIGNMENT
    tokens = torch.randint(vocab_size, (rows,), generator=draw)
    positions = torch.randint(min(length, context_length), (rows,), generator=draw)
    stores = [
        torch.randn(shape, generator=draw).to(device, store.dtype)
        for shape, store in zip(cache.shapes(rows, length), cache.stores, strict=True)
    ]
    halves = [(rows - rows // 2, length), (rows, length)]  # which run over all positions, for these are in no order
    inputs = tokens.to(device), positions.to(device), torch.arange(length, device=device), stores, torch.tensor(halves)
    return (*inputs, inputs[1] // 2) if sees_images else inputs


def _copy(inputs: StepInputs) -> StepInputs:
    return *inputs[:3], [store.clone() for store in inputs[3]], *inputs[4:]


MIN_ROWS = 4
"""Least rows of a step. Fewer samples are filled up with padding."""

VECTORS = 32
"""Numbers that PyTorch's loops over float32 process at a time: two vectors of AVX-512."""

NARROWEST = 4
"""Least width that is considered. Narrower layers gate shared experts, and such models are not invariant anyway."""


class Decoder:
    """A decoder for causal language models whose layers are of `kv_cache.KINDS`.

    Args:
        model: model in evaluation mode; its attention implementation is replaced where it is SDPA.
        max_rows: samples that run at a time.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        self.model = model
        self.max_rows = max(max_rows, MIN_ROWS)
        self.device = model.device
        self.in_segments = self.device.type == "cpu"
        """Whether attention runs over segments of rows. On a GPU it does not, since a GPU starts kernels more slowly
        than it reads."""
        self.context_length = context_length(model.config)
        self.vocab_size = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        widths = {parameter.shape[0] for parameter in model.parameters() if parameter.dim() < 3}
        uneven = [width for width in widths if width % VECTORS and width >= NARROWEST]
        self._padding = -(-(VECTORS - 1) // min(uneven)) if uneven else 0
        layer_types = _layer_types(model.config.get_text_config())
        self._kinds = kinds_of(model.config.get_text_config(), layer_types)
        # An indexer's selection reaches attention as a mask only where the library knows its implementation.
        if model.config._attn_implementation == "sdpa" and not _SPARSE & {*layer_types}:
            model.set_attn_implementation(SLOT_ATTENTION)
        if COMPRESSED & {*layer_types}:
            model.set_attn_implementation(COMPRESSED_ATTENTION)
        self.routes = RouteRecorder(model)
        """Recorder of the experts that the model chooses."""
        self._example, _ = self.forward_prompts(torch.zeros(1, 1, dtype=torch.int64))
        self.cache = KVCache(self._example, self._kinds)
        if not self.cache.stores:
            raise BadModel(
                f"Model type {model.config.model_type} does not use the library's cache, which the transformers "
                "rollout engine needs: use another model."
            )
        self.sees_images = sees_images(model.config)
        windows = _windows(model.config.get_text_config(), layer_types)
        step = DecodingStep(model, windows, self.cache.layers, self.routes)
        # Models of images and text count their positions' kinds in Python at every step, so a recording is of no use.
        recording = None if self.sees_images else record(step, self.cache, self.context_length, self.vocab_size)
        self.step: Step = recording or step

    def num_rows(self, size: int) -> int:
        """Return the rows of a step for `size` samples, padding included."""
        return max(size + self._padding, MIN_ROWS)

    def prefill_length(self, tokens: np.ndarray) -> int:
        """Return the length of a forward pass for all tokens except the last, padding included. It depends on these
        tokens alone."""
        length = len(tokens) - 1
        if not length or not self.cache.retains_prefixes:
            return length
        return min(round_up(length + self._padding), self.context_length)

    def prefill_rows(self, prompts: int, length: int) -> int:
        """Return the rows of a forward pass for `prompts` prompts of that length, padding included."""
        if self.cache.retains_prefixes:
            return prompts
        return -(-max(prompts * length + self._padding, MIN_ROWS) // length)

    def forward_prompts(self, input_ids: torch.Tensor, seen: "ImageInputs | None" = None) -> tuple[Cache, torch.Tensor]:
        """Return what the layers store of prompts [P, S], and the experts [P, S, layers, top-k] of their tokens.

        Args:
            seen: what the model reads besides the tokens.
        """
        prompts = prompt_cache(self._kinds)
        prepared: AbstractContextManager[dict[str, Any]] = (
            nullcontext({}) if seen is None else seen.applied_to(self.model)
        )
        with torch.inference_mode(), prepared as image_arguments:
            self.model(
                input_ids=input_ids.to(self.device),
                past_key_values=prompts,
                use_cache=True,
                logits_to_keep=1,
                **image_arguments,
            )
        routes = self.routes.take()
        return prompts, routes.view(*input_ids.shape, *routes.shape[1:]) if self.routes.layers else routes

    @property
    def image_problem(self) -> Callable[[GenerateRequest], str | None]:
        """Function that returns what is wrong with a request's images, if anything."""
        if not self.sees_images:
            return sees_no_images
        from cairn.engines.models.vision import image_problem  # few models need it

        def problem(request: GenerateRequest) -> str | None:
            if not request.images:
                return None
            return image_problem(self.model, np.asarray(request.input_ids), request.images)

        return problem

    def see(self, known: np.ndarray, request: GenerateRequest, length: int) -> "ImageInputs | None":
        """Return what the model reads besides a prompt's tokens except the last, padded to a length; None without
        images."""
        if not request.images:
            return None
        from cairn.engines.models.vision import image_inputs

        return image_inputs(self.model, [known], [request.images], length)

    def forget(self) -> None:
        """Discard the cache: its memory, and the remains of a pass that failed. The remains may not be finite, and
        everything after a slot's length must be."""
        self.cache = KVCache(self._example, self._kinds)


_SPARSE = {"indexed_attention"}


def _layer_types(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer, as in `KINDS`. Raises BadModel."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    layer_types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    if unknown := {*layer_types} - {*KINDS, *COMPRESSED}:
        raise BadModel(
            f"Model type {config.model_type} has layers of kind {min(unknown)}, for which the transformers rollout "
            f"engine has no cache: use a model whose layers are of {', '.join([*KINDS, *sorted(COMPRESSED)])}."
        )
    if getattr(config, "number_of_conv_states", 1) > 1:
        raise BadModel(
            f"Model type {config.model_type} has layers with several states of convolutions, for which the "
            "transformers rollout engine has no cache: use another model."
        )
    return layer_types


def _windows(config: PretrainedConfig, layer_types: Sequence[str]) -> dict[str, int | None]:
    """Return the kinds of attention layers, with their sliding windows in tokens (None: unbounded)."""
    attention = {*layer_types} - {"linear_attention"}
    in_window = {"sliding_attention", *COMPRESSED}
    return {kind: config.sliding_window if kind in in_window else None for kind in sorted(attention)}
