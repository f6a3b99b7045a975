"""Weights of off-policy tokens, and what is measured of them, against their formulas in Python's floats, response by
response, over ragged masks, empty responses and log-probs that are far apart."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.losses.objective import correction_weights, loss_and_metrics, masked, mean_weight, mismatch
from cairn.engines.training.needs import scores_needed
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of
from tests.engines.training.ragged import Response, batch_of, responses, tokens_of


def exp(value: float) -> float:
    return math.exp(min(max(value, -20.0), 20.0))


def ratios(apart: list[float], level: str) -> list[float]:
    """Of the trained tokens of a response, from trainer's minus rollout engine's log-probs."""
    if level == "token":
        return [exp(value) for value in apart]
    return [exp(sum(apart) / (max(len(apart), 1) if level == "geometric" else 1))] * len(apart)


def expected_weights(apart: list[float], options: dict[str, Any]) -> list[float]:
    low, high = options.get("tis_clip_low", 0.0), options.get("tis_clip", 2.0)
    bound: dict[str, Callable[[float], float]] = {
        "truncate": lambda ratio: min(ratio, high),
        "clip": lambda ratio: min(max(ratio, low), high),
        "mask": lambda ratio: ratio if low <= ratio <= high else 0.0,
    }
    weights = [bound[options.get("tis_mode", "truncate")](r) for r in ratios(apart, options.get("tis_level", "token"))]
    if options.get("use_rs"):
        least, most = options.get("rs_lower_bound", low), options.get("rs_upper_bound", high)
        tested = ratios(apart, options.get("rs_level", "token"))
        weights = [weight if least <= ratio <= most else 0.0 for weight, ratio in zip(weights, tested, strict=True)]
    veto = options.get("rs_veto_threshold")
    if veto is not None and any(value < math.log(veto) for value in apart):
        weights = [0.0] * len(apart)
    return weights


MIS: dict[str, dict[str, Any]] = {
    "tis": {},
    "icepop": {"tis_mode": "mask", "tis_clip_low": 0.5, "tis_clip": 5.0},
    "token, clip": {"tis_mode": "clip", "tis_clip_low": 0.5},
    "sequence, truncate": {"tis_level": "sequence"},
    "sequence, mask": {"tis_level": "sequence", "tis_mode": "mask", "tis_clip_low": 0.3},
    "geometric, clip": {"tis_level": "geometric", "tis_mode": "clip", "tis_clip_low": 0.9, "tis_clip": 1.1},
    "token, rejected by sequence": {
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.4,
        "rs_upper_bound": 3.0,
    },
    "sequence, rejected by token, vetoed": {"tis_level": "sequence", "use_rs": True, "rs_veto_threshold": 1e-2},
    "vetoed": {"rs_veto_threshold": 0.5},
}


@pytest.mark.parametrize("name", MIS)
@settings(max_examples=25, deadline=None)
@given(samples=responses)
def test_weights_are_those_of_the_formula_and_what_is_rejected_leaves_the_numerator_alone(
    name: str, samples: list[Response]
) -> None:
    algorithm = AlgorithmConfig(use_tis=True, custom_tis_function_path="mis", **MIS[name])
    if name in ("tis", "icepop"):  # which mis contains
        bounds = {key: value for key, value in MIS[name].items() if key != "tis_mode"}
        algorithm = AlgorithmConfig(use_tis=True, custom_tis_function_path=name, **bounds)
    batch = batch_of(samples)
    tokens = tokens_of(batch, algorithm)
    weights, metrics = correction_weights(tokens, algorithm)
    apart = [[old - rollout for trained, old, rollout in sample if trained] for sample in samples]
    expected = [weight for values in apart for weight in expected_weights(values, MIS[name])]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-4)
    assert all(values.isfinite().all() for values in metrics.values())

    current = tokens.old_log_probs
    assert current is not None
    learned = current.clone().requires_grad_()
    loss, _ = loss_and_metrics(learned, torch.zeros_like(learned), tokens, algorithm)
    (gradient,) = torch.autograd.grad(loss, learned)
    counts = [len(values) for values in apart for _ in values]
    right = [-weight / (len(samples) * count) for weight, count in zip(expected, counts, strict=True)]
    np.testing.assert_allclose(gradient.numpy(), right, rtol=1e-4)


@pytest.mark.parametrize("name", MIS)
@settings(max_examples=10, deadline=None)
@given(samples=responses)
def test_normalised_weights_have_the_mean_1_over_what_counts(name: str, samples: list[Response]) -> None:
    algorithm = AlgorithmConfig(use_tis=True, custom_tis_function_path="mis", tis_batch_normalize=True, **MIS[name])
    batch = batch_of(samples)
    apart = [[old - rollout for trained, old, rollout in sample if trained] for sample in samples]
    weights = [expected_weights(values, MIS[name]) for values in apart]
    counted = [[weight for weight in values if weight] for values in weights]
    if algorithm.tis_level == "token":
        means = [weight for values in counted for weight in values]
    else:
        means = [sum(values) / len(values) for values in counted if values]
    expected = sum(means) / len(means) if means else 1.0
    assert mean_weight(batch, range(len(batch)), algorithm) == pytest.approx(expected, rel=1e-4)


NORMALISED = AlgorithmConfig(
    loss_type="gspo",
    use_tis=True,
    custom_tis_function_path="mis",
    tis_batch_normalize=True,
    use_rs=True,
    rs_level="geometric",
)


def test_a_mean_over_the_step_asks_for_scores_in_a_single_step_too() -> None:
    assert scores_needed(NORMALISED) == {"old_log_probs": "actor"}
    assert scores_needed(NORMALISED.model_copy(update={"tis_batch_normalize": False})) == {}


def test_normalised_updates_are_the_same_in_micro_batches_of_any_size_and_need_old_log_probs(tmp_path: Path) -> None:
    folder, batch = model_folder(tmp_path / "model"), make_batch(10, old=True, rollout=True)
    whole, small = (
        make_engine(folder, algorithm=NORMALISED, max_tokens_per_gpu=size, adam_eps=1e-5) for size in (None, 40)
    )
    with pytest.raises(ValueError, match=r"has no old_log_probs, which algorithm\.tis_batch_normalize needs"):
        whole.train(dataclasses.replace(batch, old_log_probs=None), num_steps=1, expected_version=0, input_digest="d")
    results = [
        engine.train(batch, num_steps=2, expected_version=0, input_digest="d").metrics for engine in (whole, small)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)
    assert abs(results[0]["tis_batch_norm"] - 1) > 0.05
    for name, tensor in weights_of(whole).items():
        torch.testing.assert_close(weights_of(small)[name], tensor, rtol=0, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(samples=responses)
def test_responses_that_became_less_probable_do_not_count_where_their_advantage_is_negative(
    samples: list[Response],
) -> None:
    """The first log-prob of a token stands for the policy that is trained, the second is the rollout engine's."""
    algorithm = AlgorithmConfig(use_opsm=True, opsm_delta=0.3)
    advantages = [np.array([-1.0, 1.0, 0.0, -1.0], np.float32)[: len(sample)] for sample in samples]
    batch = dataclasses.replace(batch_of(samples), advantages=advantages)
    tokens = tokens_of(batch, algorithm)
    expected = []
    for sample, values in zip(samples, advantages, strict=True):
        moved = [sampled - current for trained, current, sampled in sample if trained]
        far = bool(moved) and sum(moved) / len(moved) > 0.3
        expected += [float(far and value < 0) for (trained, _, _), value in zip(sample, values, strict=True) if trained]
    current = tokens.old_log_probs
    assert current is not None
    assert masked(current, tokens, algorithm).tolist() == expected
    learned = current.clone().requires_grad_()
    loss, metrics = loss_and_metrics(learned, torch.zeros_like(learned), tokens, algorithm)
    (gradient,) = torch.autograd.grad(loss, learned)
    assert gradient.isfinite().all()
    assert not gradient[torch.tensor(expected, dtype=torch.bool)].any()
    share = sum(w * e for w, e in zip(tokens.shares.tolist(), expected, strict=True))
    assert float(metrics["opsm_clipfrac"]) == pytest.approx(share, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(samples=responses)
def test_measures_of_mismatch_are_those_of_their_formulas(samples: list[Response]) -> None:
    algorithm = AlgorithmConfig(get_mismatch_metrics=True, tis_clip=1.5, tis_clip_low=0.5)
    tokens = tokens_of(batch_of(samples), algorithm)
    assert tokens.old_log_probs is not None
    found = mismatch(tokens.old_log_probs, tokens, algorithm)
    expected: dict[str, list[float]] = {name: [] for name in found}
    for sample in samples:
        trainer = [old for trained, old, _ in sample if trained]
        rollout = [other for trained, _, other in sample if trained]
        if not trainer:
            continue
        mine, engine = -sum(trainer) / len(trainer), -sum(rollout) / len(rollout)
        whole = sum(trainer) - sum(rollout)
        for one, other in zip(trainer, rollout, strict=True):
            ratio = exp(one - other)
            row = {
                "mis_kl": other - one,
                "mis_k3_kl": ratio - 1 - (one - other),
                "mis_training_log_ppl": mine,
                "mis_training_ppl": exp(mine),
                "mis_rollout_log_ppl": engine,
                "mis_rollout_ppl": exp(engine),
                "mis_log_ppl_diff": mine - engine,
                "mis_log_ppl_abs_diff": abs(mine - engine),
                "mis_ppl_ratio": exp(mine - engine),
                "mis_chi2_token": ratio**2 - 1,
                "mis_chi2_seq": exp(whole) ** 2 - 1,
                "mis_outside": float(not 0.5 <= ratio <= 1.5),
            }
            for name, value in row.items():
                expected[name].append(value)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_mismatch_is_measured_where_nothing_is_corrected_and_costs_no_scores_in_a_single_step(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(get_mismatch_metrics=True)
    assert scores_needed(algorithm) == {}
    assert scores_needed(algorithm, num_steps=2) == {"old_log_probs": "actor"}
    engine = make_engine(model_folder(tmp_path / "model"), algorithm=algorithm)
    batch = make_batch(4)
    with pytest.raises(ValueError, match=r"has no rollout_log_probs, which algorithm\.get_mismatch_metrics needs"):
        engine.train(batch, num_steps=1, expected_version=0, input_digest="d")
    scored = dataclasses.replace(batch, rollout_log_probs=engine.score(batch, "actor"))
    metrics = engine.train(scored, num_steps=1, expected_version=0, input_digest="d").metrics
    assert metrics["mis_ppl_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["mis_training_log_ppl"] > 1
    assert "tis" not in metrics
