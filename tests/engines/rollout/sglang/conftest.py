from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="session")
def model(sglang_model: Path) -> PreTrainedModel:
    """By Hugging Face, what the server serves; to be left as it is."""
    return AutoModelForCausalLM.from_pretrained(sglang_model, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _initial_weights(request: pytest.FixtureRequest) -> None:
    """Whatever another test left the session's server with."""
    if "engine" in request.fixturenames:
        engine, model = request.getfixturevalue("engine"), request.getfixturevalue("model")
        engine.begin_weight_update(0)
        engine.update_weights({name: value.detach() for name, value in model.named_parameters()})
        engine.end_weight_update()
