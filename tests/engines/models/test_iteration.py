"""A whole iteration of every architecture by the embedded engines: `transformers` generates, `torch` trains, and what
was trained generates. Those that Cairn promises by name are among the quick tests."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.engines.models.folders import WEIGHTS, parameter_names
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams, TrainBatch
from cairn.engines.weights.checksum import folder_checksum
from tests.architectures import ARCHITECTURES, VOCABULARY, Architecture, architecture
from tests.engines.rollout.models import rollout_config, same
from tests.engines.training.builders import make_engine
from tests.model_table import Check, record
from tests.requests import by_id, group

PROMPTS = (1, 2, 15, 33, 33, 60)
"""Lengths: shorter than a convolution reaches, longer than windows and selections, two that share a prefill."""
SAMPLES = 2

Completions = dict[RequestId, Completion]


def requests(**params: Any) -> list[GenerateRequest]:
    draw = np.random.default_rng(0)
    return [
        request
        for number, length in enumerate(PROMPTS)
        for request in group(
            number,
            draw.integers(3, VOCABULARY, size=length).tolist(),
            draw.integers(2**62, size=SAMPLES).tolist(),
            SamplingParams(**{"max_new_tokens": 6 + 5 * number, **params}),
        )
    ]


def batch_of(requested: Sequence[GenerateRequest], samples: Completions) -> TrainBatch:
    """With the first sample of each group better than the others."""
    done = [samples[request.request_id] for request in requested]
    signs = [1 if request.request_id[1] == 0 else -1 for request in requested]
    return TrainBatch(
        input_ids=[
            np.array([*request.input_ids, *sample.response_ids], np.int32)
            for request, sample in zip(requested, done, strict=True)
        ],
        response_lengths=[len(sample.response_ids) for sample in done],
        loss_mask=[np.ones(len(sample.response_ids), np.uint8) for sample in done],
        advantages=[
            np.full(len(sample.response_ids), sign, np.float32) for sign, sample in zip(signs, done, strict=True)
        ],
        rollout_log_probs=[sample.log_probs for sample in done],
    )


def largest_difference(scores: Sequence[np.ndarray], batch: TrainBatch) -> float:
    assert batch.rollout_log_probs is not None
    return max(float(np.abs(one - other).max()) for one, other in zip(scores, batch.rollout_log_probs, strict=True))


def send(weights: Sequence[dict[str, torch.Tensor]], engine: TransformersEngine, version: int) -> None:
    engine.begin_weight_update(version)
    for bucket in weights:
        engine.update_weights(bucket)
    engine.end_weight_update()


def quickly(*names: str) -> Any:
    """Parametrizes by architecture; those that are not named are slow."""
    cases = [pytest.param(each, marks=() if each.name in names else pytest.mark.slow) for each in ARCHITECTURES]
    return pytest.mark.parametrize("of", cases, ids=lambda each: each.name)


@quickly(*(each.name for each in ARCHITECTURES if each.named))
def test_an_iteration_trains_what_was_sampled_and_samples_from_what_was_trained(
    of: Architecture, tmp_path: Path
) -> None:
    folder = of.save(tmp_path / "model")
    rollout = TransformersEngine(str(folder), rollout_config(max_running_requests=5))  # so that slots are used again
    training = make_engine(folder, max_tokens_per_gpu=150)
    requested = requests()
    initial = by_id(rollout.generate(requested))
    batch = batch_of(requested, initial)
    before = largest_difference(training.score(batch, "actor"), batch)
    training.train(batch, num_steps=1, expected_version=0, input_digest="d")

    weights = list(training.export_weights(1 << 16))
    assert {name for bucket in weights for name in bucket} == parameter_names(folder)
    send(weights, rollout, 1)
    assert rollout.weights_checksum() == training.weights_checksum() != folder_checksum(folder, "float32")

    samples = by_id(rollout.generate(requested))
    assert not any(same(initial[id], samples[id]) for id in initial)
    assert {int(v) for sample in samples.values() for v in sample.weight_versions} == {1}
    batch = batch_of(requested, samples)
    after = largest_difference(training.score(batch, "actor"), batch)
    assert max(before, after) <= 1e-4
    record(of.name, Check.ITERATION, max(before, after))

    training.export_hf(tmp_path / "trained")
    assert folder_checksum(tmp_path / "trained", "float32") == training.weights_checksum()


@quickly("deepseek_v3")
def test_rounded_weights_are_those_that_the_trainer_says_and_biases_of_routers_stay_exact(
    of: Architecture, tmp_path: Path
) -> None:
    folder = of.save(tmp_path / "model")
    rollout = TransformersEngine(str(folder), rollout_config(dtype="bfloat16"))
    assert rollout.weights_checksum() == folder_checksum(folder, "bfloat16")
    for version, dtype in enumerate(("float32", "bfloat16"), 1):
        training = make_engine(folder, dtype=dtype)
        send(list(training.export_weights(1 << 20)), rollout, version)
        assert (
            rollout.weights_checksum() == training.weights_checksum("bfloat16") == folder_checksum(folder, "bfloat16")
        )
        training.export_hf(tmp_path / dtype)
        assert folder_checksum(tmp_path / dtype, "bfloat16") == rollout.weights_checksum()


@quickly("deepseek_v3")
def test_a_sample_that_was_aborted_goes_on_as_if_it_had_not_been(of: Architecture, tmp_path: Path) -> None:
    """But for rounding: what came before is then prefilled."""
    engine = TransformersEngine(str(of.save(tmp_path)), rollout_config())
    requested = requests(max_new_tokens=24)
    whole = by_id(engine.generate(requested))
    stream, begun = engine.open(), {}
    stream.submit([*requested, *group(99, [5], [0], SamplingParams(max_new_tokens=9))])
    for part in stream:
        begun |= by_id([part])
        stream.abort()
    del begun[99, 0]
    assert {sample.finish_reason for sample in begun.values()} == {FinishReason.ABORT}
    assert {len(sample.response_ids) for sample in begun.values()} == {9}
    continued = [
        replace(one, input_ids=[*one.input_ids, *begun[one.request_id].response_ids.tolist()], position=9)
        for one in requested
    ]
    for id, rest in by_id(engine.generate(continued)).items():
        log_probs = np.concatenate([begun[id].log_probs, rest.log_probs])
        assert [*begun[id].response_ids, *rest.response_ids] == whole[id].response_ids.tolist()
        np.testing.assert_allclose(log_probs, whole[id].log_probs, atol=1e-4, rtol=0)


def wrap(folder: Path) -> None:
    """Make it a folder as Kimi K2.5 and K2.6 have it: the language model below a model that reads images."""
    config = json.loads((folder / "config.json").read_text())
    vision = {"vision_tower.patch_embed.proj.weight": torch.ones(4, 3, 2, 2)}
    weights = load_file(folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    save_file({**{f"language_model.{name}": weight for name, weight in weights.items()}, **vision}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("model_type", "name"), [("kimi_k2", "deepseek_v3"), ("kimi_k25", "deepseek_v3"), ("mimo", "qwen2")]
)
def test_models_that_the_library_has_no_class_for_are_trained_as_what_they_are(
    model_type: str, name: str, tmp_path: Path
) -> None:
    folder = architecture(name).save(tmp_path)
    alone = folder_checksum(folder, "float32")
    config = json.loads((folder / "config.json").read_text())
    kind = "kimi_k2" if model_type == "kimi_k25" else model_type
    config |= {"model_type": kind, "architectures": ["OfItsOwn"], "auto_map": {"AutoConfig": "its.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    if model_type == "kimi_k25":
        wrap(folder)
    assert folder_checksum(folder, "float32") == alone
    rollout, training = TransformersEngine(str(folder), rollout_config()), make_engine(folder)
    requested = requests()
    batch = batch_of(requested, by_id(rollout.generate(requested)))
    assert largest_difference(training.score(batch, "actor"), batch) <= 1e-4
    training.train(batch, num_steps=1, expected_version=0, input_digest="d")
    send(list(training.export_weights(1 << 20)), rollout, 1)
    assert rollout.weights_checksum() == training.weights_checksum()
    training.export_hf(tmp_path / "trained")
    assert folder_checksum(tmp_path / "trained", "float32") == training.weights_checksum()
