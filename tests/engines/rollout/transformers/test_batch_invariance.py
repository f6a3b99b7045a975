"""A sample depends on the weights, its prompt, its seed and its sampling parameters: bit for bit, in any company."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cairn.engines.rollout.transformers import decoding as segments
from cairn.engines.rollout.transformers.batch import Batch, Sample
from cairn.engines.rollout.transformers.engine import TransformersEngine
from tests.engines.rollout.models import Samples, collect, configs, random_requests, rollout_config, same
from tests.requests import by_id, group
from tests.tiers import Tier, marks

QUICK = ("qwen2", "qwen3")
"""Models that the tier `quick` runs; the other kinds of attention and positions are in `proofs`."""


def some(names: Iterable[str]) -> list[Any]:
    """Parameters with the marks of their tiers."""
    return [pytest.param(name, marks=marks(Tier.QUICK if name in QUICK else Tier.PROOFS)) for name in names]


def assert_same_samples(result: Samples, expected: Samples) -> None:
    assert result.keys() <= expected.keys()
    different = [key for key, sample in result.items() if not same(sample, expected[key])]
    assert not different


@pytest.mark.parametrize("architecture", some(name for name in configs() if name != "qwen3"))
def test_samples_are_equal_alone_together_and_in_another_order(
    architecture: str, model_folders: dict[str, str]
) -> None:
    engine = TransformersEngine(model_folders[architecture], rollout_config())
    requests = random_requests(seed=1, count=12)
    together = collect(engine, requests)
    assert len(together) == len(requests)
    assert_same_samples(collect(engine, requests[::-1]), together)
    for request in requests:
        assert_same_samples(collect(engine, [request]), together)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2, 3))])
def test_samples_are_equal_in_random_companies_and_numbers_of_rows(seed: int, model_folders: dict[str, str]) -> None:
    requests = random_requests(seed=100 + seed, count=30)
    expected = collect(TransformersEngine(model_folders["qwen3"], rollout_config()), requests)
    draw = random.Random(seed)
    for max_running_requests in (4, 5, draw.randrange(6, 40), draw.randrange(40, 100)):
        engine = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=max_running_requests))
        some = draw.sample(requests, draw.randrange(1, len(requests)))
        assert_same_samples(collect(engine, some), expected)


@pytest.mark.parametrize("architecture", some(["qwen3", "qwen2-sliding", "gated-delta"]))
def test_samples_are_equal_in_segments_of_rows_that_change_places(
    architecture: str, model_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(seed=11, count=30)
    expected = collect(TransformersEngine(model_folders[architecture], rollout_config()), requests)
    monkeypatch.setattr(segments, "WORTH", 1)
    moved = list[int]()
    rearrange = Batch.rearrange

    def counted(batch: Batch, order: np.ndarray) -> None:
        moved.append(len(order))
        rearrange(batch, order)

    monkeypatch.setattr(Batch, "rearrange", counted)
    engine = TransformersEngine(model_folders[architecture], rollout_config(max_running_requests=24))
    assert_same_samples(collect(engine, requests), expected)
    assert moved


def test_a_group_finished_after_a_kill_is_what_it_would_have_been(model_folders: dict[str, str]) -> None:
    requests = random_requests(seed=7, count=16)
    expected = collect(TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=24)), requests)
    killed = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=24))
    finished: Samples = {}
    for completions in killed.generate(requests):
        finished |= by_id([completions])
        if len(finished) > 20:
            break
    unfinished = {one.request_id[0] for one in requests if one.request_id not in finished}
    whole = {one.request_id[0] for one in requests} - unfinished
    assert whole
    assert unfinished
    restarted = TransformersEngine(model_folders["qwen3"], rollout_config(max_running_requests=24))
    rest = collect(restarted, [one for one in requests if one.request_id[0] in unfinished])
    retained = {key: sample for key, sample in finished.items() if key[0] in whole}
    assert (retained | rest).keys() == expected.keys()
    assert_same_samples(retained | rest, expected)


def test_a_sample_depends_on_its_own_seed_only(qwen3: TransformersEngine) -> None:
    one = random_requests(seed=3, count=1)[0]
    expected = collect(qwen3, group(0, one.input_ids, range(10, 18), one.sampling_params))
    alone = replace(one, seed=15)
    assert same(collect(qwen3, [alone])[alone.request_id], expected[0, 5])


def test_stale_keys_and_values_in_a_slot_change_nothing(qwen3: TransformersEngine) -> None:
    requests = random_requests(seed=11, count=6)
    expected = collect(qwen3, requests)
    with torch.inference_mode():
        for store in qwen3._decoder.cache.stores:
            store.normal_(std=100)
    assert_same_samples(collect(qwen3, requests), expected)


@pytest.mark.parametrize("architecture", some(configs()))
def test_the_check_at_start_up_finds_what_the_tests_above_prove(
    architecture: str, model_folders: dict[str, str]
) -> None:
    engine = TransformersEngine(model_folders[architecture], rollout_config())
    assert engine.health()["batch_invariant"] is None
    assert engine.check_batch_invariance()
    assert engine.health()["batch_invariant"] is True


def test_the_check_notices_samples_that_depend_on_their_row(
    qwen3: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_row(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.linspace(0.1, 0.9, len(seeds), dtype=np.float32)

    monkeypatch.setattr("cairn.engines.rollout.transformers.batch.uniforms", of_the_row)
    assert not qwen3.check_batch_invariance()
    assert qwen3.health()["batch_invariant"] is False


def test_the_check_notices_samples_that_depend_on_when_they_joined(
    qwen3: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsteady(Batch):
        def add(self, samples: Sequence[Sample]) -> list[int]:
            late = self._generated[: len(self)].any()
            rows = super().add(samples)
            self._seeds[rows] += np.uint64(late)
            return rows

    monkeypatch.setattr("cairn.engines.rollout.transformers.decoding.Batch", Unsteady)
    assert not qwen3.check_batch_invariance()
