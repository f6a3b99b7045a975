"""One decoding step as a function of tensors: the model's own forward pass, and its recording.

Small steps are bound by the Python of the model's modules, not by arithmetic. The recording (TorchScript, `trace`)
replays the same kernels in the same order without that Python: the same logits, bit for bit, of any architecture. It is
used where it has proved faithful, `record` says how; elsewhere the model's Python runs.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.engines.rollout.transformers.attention import segmented
from cairn.engines.rollout.transformers.kv_cache import ALIGNMENT, KVCache, Layer, StepCache
from cairn.engines.routing import RouteRecorder

StepInputs = tuple[Any, ...]
"""What a `Step` takes."""

StepOutputs = tuple[torch.Tensor, torch.Tensor]
"""logits [B, V], and the experts [B, layers, top-k] that were chosen for the tokens; no layers without experts."""

Step = Callable[..., StepOutputs]
"""(tokens [B], positions [B], key_positions [L], stores, segments [K, 2]) -> outputs: feeds a token to each of the
slots 0 … B - 1 of a `KVCache` at its position, which extends the slot, and lets it attend to the slot's positions, of
the first L, or fewer as `segments` has it (`cairn.engines.rollout.transformers.segments`). Of a model that sees images
it takes a sixth argument, [B], the positions that the model reads, where the first ones are those in the slots."""


class DecodingStep(torch.nn.Module):
    """A `Step` that runs the model.

    Args:
        model: any causal language model whose layers are of `layer_states.KINDS`.
        windows: kind of attention layer, as in `config.layer_types` -> its sliding window in tokens, or None.
        layers: as `KVCache.layers`.
        routes: sees what experts the model chooses.
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
        """[B, 1, 1, L] each, to be added to scores: -inf behind a row's position and outside its window."""
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
    """A recording of `step`, or None where it would not be faithful.

    It is not where the model's Python looks at the values of tensors (mixtures of experts that loop over them, position
    encodings that change with the length), nor where the logits of any trial shape differ in a bit.

    Args:
        cache: gives the layers' shapes; it is left alone.
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
    """Random inputs of a step over `blocks` times `ALIGNMENT` positions, the last ones of the context. `sees_images`:
    the model does."""
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
