"""Weights that are replaced while a real server generates: none ends, and each token is of the weights it names."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import Completion, FinishReason, SamplingParams
from tests.engines.rollout.sglang.test_partial_rollout import hf_log_probs
from tests.requests import by_id, group
from tests.sglang_server import is_decoding, once_decoding
from tests.waiting import wait_for

LENGTH, SAMPLES = 400, 8
PARAMS = SamplingParams(LENGTH, stop_token_ids=())


def scaled(model: PreTrainedModel, factor: float) -> dict[str, torch.Tensor]:
    """Other weights, whose distributions differ."""
    return {name: value.detach() * factor for name, value in model.named_parameters()}


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_samples_go_on_under_new_weights_and_none_is_lost(engine: SGLangEngine, model: PreTrainedModel) -> None:
    requests = group(0, [5, 6, 7], range(SAMPLES), PARAMS)
    told: list[Completion] = []

    def update_twice() -> None:
        for version in (1, 2):
            wait_for(lambda: is_decoding(engine.health()), 60)
            engine.begin_weight_update(version, True)
            told.extend(engine.retracted())
            engine.update_weights(scaled(model, 1 + 0.2 * version))
            engine.end_weight_update()

    with once_decoding(engine.health, update_twice):
        result = by_id(engine.generate(requests))
    assert len(told) > SAMPLES / 2, "it ended before it was told"
    for part in told:
        assert part.finish_reason == FinishReason.ABORT
        assert result[part.request_id].response_ids[: len(part.response_ids)].tolist() == part.response_ids.tolist()
    worst = 0.0
    several = 0
    for request in requests:
        sample = result[request.request_id]
        assert sample.finish_reason == FinishReason.STOP or len(sample.response_ids) == LENGTH
        assert (np.diff(sample.weight_versions) >= 0).all()
        several += len(set(sample.weight_versions.tolist())) > 1
        row: dict[str, Any] = {"prompt_ids": request.input_ids, "response_ids": sample.response_ids.tolist()}
        for version in set(sample.weight_versions.tolist()):
            weights = copy.deepcopy(model)
            with torch.no_grad():
                for parameter in weights.parameters():
                    parameter.mul_(1 + 0.2 * version)
            differences = np.abs(hf_log_probs(weights, row) - sample.log_probs)[sample.weight_versions == version]
            worst = max(worst, float(differences.max()))
    assert several
    assert worst < 1e-4
