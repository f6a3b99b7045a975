"""The experts that a real SGLang server reports, and what is refused of them before one starts."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.configs.schema.rollout import RolloutConfig, ServerGroup
from cairn.engines.rollout.sglang.completions import OPTION, Routes, routes_problems
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import SamplingParams
from tests.architectures import architecture
from tests.requests import group
from tests.sglang_server import START_TIMEOUT, sglang_config

LAYERS = 2


@pytest.fixture(scope="module")
def folder(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with the tokenizer of the server's other model."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    tokenizer = AutoTokenizer.from_pretrained(sglang_model)
    tokenizer.save_pretrained(folder)
    config = architecture("qwen3_moe").make_config()
    config.update({"num_hidden_layers": LAYERS, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow  # for a server of its own
@pytest.mark.timeout(600)
def test_the_experts_of_every_token_are_those_of_the_librarys_model(folder: Path, tmp_path: Path) -> None:
    engine = SGLangEngine(str(folder), sglang_config(**{OPTION: True}), "cpu", tmp_path / "log", START_TIMEOUT)
    try:
        params = SamplingParams(max_new_tokens=12, return_routed_experts=True)
        requested = [one for number in range(3) for one in group(number, [5 + number, 6, 7, 8, 9], range(2), params)]
        done = [completion for part in engine.generate(requested) for completion in part]
        untold = [c for part in engine.generate(group(9, [5, 6], [1], SamplingParams(max_new_tokens=4))) for c in part]
    finally:
        engine.close()
    assert untold[0].routed_experts is None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    for completion in done:
        seen.clear()
        ids = [5 + completion.request_id[0], 6, 7, 8, 9, *completion.response_ids.tolist()]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        expected, result = torch.stack(seen, 1)[:-1].numpy(), completion.routed_experts
        assert result is not None
        assert result.dtype == np.uint8
        assert result.shape == expected.shape == (len(ids) - 1, LAYERS, 3)
        assert (np.sort(result, -1) == np.sort(expected, -1)).mean() > 0.99  # but for ties in rounding


def reported(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def test_a_reply_of_another_shape_is_an_error() -> None:
    routes = Routes(architecture("qwen3_moe").make_config())
    assert routes.read({}, 5) is None
    with pytest.raises(EngineError, match="not of this model"):
        routes.read({"routed_experts": "AAAAAA=="}, 5)
    with pytest.raises(EngineError, match="the experts of 0 tokens, where it read 5"):
        routes.read({"routed_experts": ""}, 5)
    for outside in (-1, 8):  # in a byte the first would be the last of 256 experts
        with pytest.raises(EngineError, match=f"{outside}.*, and the model's are 0 to 7"):
            routes.read({"routed_experts": reported(np.array([[[0, 1, outside]] * 4] * 5))}, 5)
    with pytest.raises(EngineError, match="one expert twice"):
        routes.read({"routed_experts": reported(np.zeros((5, 4, 3)))}, 5)


def test_servers_that_would_not_report_them_are_refused() -> None:
    def problems(config: RolloutConfig) -> list[str]:
        return [*routes_problems(config)]

    (sentence,) = problems(sglang_config())
    assert f"set rollout.sglang.{OPTION}: true" in sentence
    assert problems(sglang_config(**{OPTION: True})) == []
    groups = (ServerGroup(worker_type="prefill", num_engines=1), ServerGroup(worker_type="decode", num_engines=1))
    (sentence,) = problems(sglang_config(**{OPTION: True}).model_copy(update={"server_groups": groups}))
    assert "use regular servers" in sentence
