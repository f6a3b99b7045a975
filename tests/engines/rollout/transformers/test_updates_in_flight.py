"""Weights that are replaced between two decoding steps: no sample ends, and each token is of the weights it names."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cairn.engines.rollout.transformers.engine import TransformersEngine, WeightUpdate
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest
from tests.engines.rollout.models import (
    Samples,
    collect,
    configs,
    full_log_probs,
    random_requests,
    request,
    rollout_config,
    same,
    save_model,
)

UPDATES = {3: 1, 9: 2}
"""Before which steps, and to which version."""


@pytest.fixture(scope="module", params=["qwen3", "gated-delta"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of an architecture, one for each version."""
    root = tmp_path_factory.mktemp("versions")
    return [save_model(configs()[request.param], root / str(version), version) for version in range(3)]


def update(engine: TransformersEngine, version: int, folder: str) -> None:
    engine.begin_weight_update(version, in_flight=True)
    engine.update_weights(load_file(Path(folder, "model.safetensors")))
    engine.end_weight_update()


def before_steps(engine: TransformersEngine, acts: dict[int, Callable[[], None]]) -> None:
    """Have another thread do something before steps of the engine, from the first one, 1, on."""
    step, number = engine._loop._step, 0

    def counted() -> None:
        nonlocal number
        number += 1
        if number in acts:
            thread = threading.Thread(target=acts[number])
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        step()

    engine._loop._step = counted  # type: ignore[method-assign]


def segments(request: GenerateRequest, actual: Completion) -> Iterator[tuple[int, GenerateRequest, slice]]:
    """The versions of a sample, what asks for the tokens of each and all after them, and their places."""
    versions = actual.weight_versions
    assert (np.diff(versions) >= 0).all()
    for version in sorted(set(versions.tolist())):
        places = np.flatnonzero(versions == version)
        start, end = int(places[0]), int(places[-1]) + 1
        earlier = Completion.empty(request.request_id, FinishReason.ABORT)
        part = Completion(**{**vars(earlier), "response_ids": actual.response_ids[:start]})
        yield version, request.after(part), slice(start, end)


def test_each_segment_is_bit_for_bit_what_its_weights_give_after_the_tokens_before(folders: list[str]) -> None:
    requests = random_requests(seed=5, count=4)
    engine = TransformersEngine(folders[0], rollout_config(max_running_requests=6))  # some wait
    before_steps(engine, {at: lambda v=version: update(engine, v, folders[v]) for at, version in UPDATES.items()})
    actual: Samples = collect(engine, requests)
    assert actual.keys() == {one.request_id for one in requests}
    engines = [TransformersEngine(folder, rollout_config()) for folder in folders]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    several = 0
    for one in requests:
        sample = actual[one.request_id]
        several += len(set(sample.weight_versions.tolist())) == 3
        assert sample.kept is None or len(sample.kept) == len(sample.response_ids)
        for version, requested, places in segments(one, sample):
            alone = collect(engines[version], [requested])[one.request_id]
            length = places.stop - places.start
            assert alone.response_ids[:length].tolist() == sample.response_ids[places].tolist()
            assert alone.log_probs[:length].tobytes() == sample.log_probs[places].tobytes()
            if places.stop == len(sample.response_ids):
                assert (len(alone.response_ids), alone.finish_reason) == (length, sample.finish_reason)
            forced = full_log_probs(models[version], one, sample)[places]
            assert np.abs(forced - sample.log_probs[places]).max() < 1e-4
    assert several, "no sample met several versions"
    assert engine.get_weight_version() == 2


def test_what_rests_is_given_back_by_an_abort_and_told_meanwhile(qwen3: TransformersEngine) -> None:
    requests = request(0, [60, 61, 62], samples=3, max_new_tokens=30)
    undisturbed, engine = collect(qwen3, requests), qwen3
    reported: list[Completion] = []

    def fail() -> None:
        engine.begin_weight_update(1, in_flight=True)
        reported.extend(engine.retracted())
        engine.abort()

    before_steps(engine, {6: fail})
    actual = collect(engine, requests)
    with pytest.raises(EngineError, match="lacks"):
        engine.end_weight_update()
    for part in reported:
        assert part.finish_reason == FinishReason.ABORT
        assert part.response_ids.tolist() == undisturbed[part.request_id].response_ids[:5].tolist()
        assert same(part, actual[part.request_id])
    assert {len(one.response_ids) for one in actual.values()} <= {*range(1, 6)}
    assert reported
    assert not engine.retracted()


def test_what_is_asked_while_others_rest_is_generated_with_the_new_weights(qwen3: TransformersEngine) -> None:
    (first,), (late,) = request(0, [60], max_new_tokens=12), request(1, [61], max_new_tokens=12)
    weights = {name: value.clone() for name, value in qwen3._model.named_parameters()}
    stream = qwen3.open()

    def ask_meanwhile() -> None:
        qwen3.begin_weight_update(1, in_flight=True)
        stream.submit([late])
        qwen3.update_weights({name: 0.9 * value for name, value in weights.items()})
        qwen3.end_weight_update()

    before_steps(qwen3, {3: ask_meanwhile})
    stream.submit([first])
    actual = {one.request_id: one for part in stream for one in part}
    assert same(actual[late.request_id], collect(qwen3, [late])[late.request_id])
    assert set(actual[late.request_id].weight_versions.tolist()) == {1}
    assert set(actual[first.request_id].weight_versions.tolist()) == {0, 1}


def test_a_request_that_comes_while_an_update_begins_is_taken(
    qwen3: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (late,) = request(0, [60], max_new_tokens=6)
    weights = {name: value.clone() for name, value in qwen3._model.named_parameters()}
    stream = qwen3.open()

    class Slow(WeightUpdate):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(stream.submit, [late]).result(60)

    monkeypatch.setattr("cairn.engines.rollout.transformers.engine.WeightUpdate", Slow)
    qwen3.begin_weight_update(1, in_flight=True)
    qwen3.update_weights(weights)
    qwen3.end_weight_update()
    (actual,) = (one for part in stream for one in part)
    assert set(actual.weight_versions.tolist()) == {1}
