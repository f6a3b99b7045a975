"""An engine of two tensor-parallel ranks in two processes that meet as if they were on two machines."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.errors import EngineDied
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.sglang.launch import FurtherRank, launch
from engines.rollout.sglang.launch_plan import EnginePlan, Place
from engines.rollout.sglang.server import free_port
from engines.types import Completion, GenerateRequest, SamplingParams
from tests.sglang_server import START_TIMEOUT, sglang_config
from tests.waiting import wait_for


def greedy(engine: SGLangEngine) -> list[Completion]:
    asked = [GenerateRequest(index, [5 + index, 6, 7], (1,), SamplingParams(8, temperature=0.0)) for index in range(4)]
    done = [completion for part in engine.generate(asked) for completion in part]
    return sorted(done, key=lambda completion: completion.request_id)


def assert_served(completions: list[Completion], reference: PreTrainedModel) -> None:
    """The completions are those of greedy sampling from `reference`."""
    for index, completion in enumerate(completions):
        prompt, response = [5 + index, 6, 7], completion.response_ids.tolist()
        with torch.no_grad():
            log_probs = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert response == log_probs.argmax(-1).tolist()
        np.testing.assert_allclose(completion.log_probs, log_probs.max(-1).values.numpy(), atol=1e-4)


@torch.no_grad()
def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other weights."""
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.timeout(600)
def test_two_machines_serve_and_take_weights_as_one_and_death_is_noticed(sglang_model: Path, tmp_path: Path) -> None:
    config, model = sglang_config(), str(sglang_model)
    plan = EnginePlan(nnodes=2, options={**config.sglang, "tp_size": 2})
    meeting = f"127.0.0.1:{free_port()}"
    second_place = Place(node_rank=1, dist_init_addr=meeting)
    with ExitStack() as closing:

        def start_second() -> FurtherRank:
            launched = launch(model, config, "cpu", plan, second_place, tmp_path / "1", START_TIMEOUT)
            closing.callback(launched.server.stop)
            return FurtherRank(launched.server)

        with ThreadPoolExecutor() as pool:
            second = pool.submit(start_second)
            place = Place(dist_init_addr=meeting)
            engine = SGLangEngine(model, config, "cpu", tmp_path / "0", START_TIMEOUT, plan, place)
            closing.callback(engine.close)
            rank = second.result()
        reference = AutoModelForCausalLM.from_pretrained(sglang_model, dtype=torch.float32).eval()
        assert_served(greedy(engine), reference)
        shaken(reference).save_pretrained(tmp_path / "new")
        engine.begin_weight_update(1)
        engine.update_weights_from_disk(tmp_path / "new")
        engine.end_weight_update()
        assert_served(greedy(engine), reference)
        engine.begin_weight_update(2)
        engine.update_weights(dict(shaken(reference).named_parameters()))
        engine.end_weight_update()
        assert_served(greedy(engine), reference)
        server = psutil.Process(rank.health()["server_pid"])
        server.kill()
        wait_for(lambda: not server.is_running(), 60)
        with pytest.raises(EngineDied, match="a process of an SGLang server is gone"):
            wait_for(lambda: rank.health() is None, 60)
