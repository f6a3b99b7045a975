"""Rollout engines of a test's own process that begin as new ones do, without what takes a new one half a second.

A model's decoding step is recorded once a module of tests, and tried once for whether samples depend on their company:
an engine that is no longer used leaves its decoder to the next of the same model and size, which reads its weights
from its folder as ever.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

if TYPE_CHECKING:  # tests without engines need not wait for PyTorch
    from torch import Tensor
    from transformers import PreTrainedModel

    from cairn.configs.schema.rollout import RolloutConfig
    from cairn.engines.rollout.transformers.decoder import Decoder
    from cairn.engines.rollout.transformers.engine import TransformersEngine

_spare: "dict[Hashable, list[Decoder]]" = defaultdict(list)
_invariant: dict[Hashable, bool] = {}
_at_work: "list[TransformersEngine]" = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Release the engines that a test itself has made, not those of its fixtures."""
    _at_work.clear()
    yield
    while _at_work:
        release(_at_work[-1])


def engine_of(model_path: str, config: "RolloutConfig") -> "TransformersEngine":
    """Return an engine whose batch invariance was tested."""
    from cairn.engines.rollout.transformers import engine as module

    with patch.object(module, "Decoder", _decoder_of):
        engine = module.TransformersEngine(model_path, config)
    engine._model = engine._decoder.model
    kind = _kind(engine._model, engine._decoder.max_rows)
    if kind not in _invariant:
        _invariant[kind] = engine.check_batch_invariance()
    engine._batch_invariant = _invariant[kind]
    _at_work.append(engine)
    return engine


def forget() -> None:
    """Drop all spare decoders and test results."""
    _at_work.clear()
    _spare.clear()
    _invariant.clear()


def release(engine: "TransformersEngine") -> None:
    """Make the decoder of an engine that is no longer used available to the next one."""
    if engine in _at_work:
        _at_work.remove(engine)
        decoder = copy(engine._decoder)  # which the engine may still forget
        _spare[_kind(decoder.model, decoder.max_rows)].append(decoder)


def _decoder_of(model: "PreTrainedModel", max_rows: int) -> "Decoder":
    import torch

    from cairn.engines.rollout.transformers.decoder import MIN_ROWS, Decoder

    spare = _spare[_kind(model, max(max_rows, MIN_ROWS))]
    if not spare:
        return Decoder(model, max_rows)
    decoder = spare.pop()
    with torch.no_grad():
        for own, loaded in zip(_tensors(decoder.model), _tensors(model), strict=True):
            own.copy_(loaded)
    decoder.forget()
    return decoder


def _tensors(model: "PreTrainedModel") -> "chain[Tensor]":
    return chain(model.parameters(), model.buffers())


def _kind(model: "PreTrainedModel", max_rows: int) -> Hashable:
    from torch import get_num_threads

    return model.config.to_json_string(), model.dtype, max_rows, get_num_threads()
