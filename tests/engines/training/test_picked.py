"""Losses that treat some tokens of an optimizer step apart: which these are, and that the cut of the step is nothing to
them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.configs.kinds import plugin
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.losses import clip_cov, kl_cov
from cairn.engines.training.losses.objective import with_picked
from cairn.engines.training.needs import scores_needed
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

numbers = st.lists(st.tuples(*[st.integers(-40, 40).map(lambda n: n / 8)] * 2), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(rows=numbers, share=st.floats(0.01, 1), bounds=st.tuples(st.integers(-8, 3), st.integers(4, 20)))
def test_the_tokens_of_the_highest_covariance_pay_and_of_those_between_bounds_so_many_are_drawn(
    rows: list[tuple[float, float]], share: float, bounds: tuple[int, int]
) -> None:
    advantages, log_probs = np.array(rows, np.float32).T
    products = [(a - np.mean([a for a, _ in rows])) * (p - np.mean([p for _, p in rows])) for a, p in rows]
    count = max(1, int(share * len(rows)))

    pay = kl_cov.highest(advantages, log_probs, AlgorithmConfig(loss_type="kl_cov", kl_cov_ratio=share))
    assert pay.sum() == count
    assert sorted(np.array(products)[pay]) == pytest.approx(sorted(products)[-count:])

    low, high = bounds
    config = AlgorithmConfig(loss_type="clip_cov", clip_cov_ratio=share, clip_cov_lb=low, clip_cov_ub=high)
    drawn = clip_cov.drawn(advantages, log_probs, config)
    between = np.array([low < product < high for product in products])
    assert not (drawn & ~between).any()
    assert drawn.sum() == min(count, between.sum())
    assert np.array_equal(drawn, clip_cov.drawn(advantages, log_probs, config))


def test_who_is_drawn_is_not_always_the_same() -> None:
    config = AlgorithmConfig(loss_type="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=-100, clip_cov_ub=100)
    rng = np.random.default_rng(0)
    found = sum(clip_cov.drawn(*rng.normal(size=(2, 40)), config).astype(int) for _ in range(200))
    assert found.sum() == 200 * 4
    assert found.min() > 0
    assert found.max() < 60


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_weights_do_not_depend_on_how_the_step_is_cut_and_the_tokens_apart_are_counted(
    name: str, tmp_path: Path
) -> None:
    options = {"clip_cov_lb": -9, "clip_cov_ub": 9} if name == "clip_cov" else {}
    algorithm = AlgorithmConfig(loss_type=name, **{f"{name}_ratio": 0.3}, **options)
    assert "old_log_probs" in scores_needed(algorithm, 1)
    folder = model_folder(tmp_path)
    batch = make_batch(8, old=True)
    found = {}
    for most in (None, 24):
        engine = make_engine(folder, algorithm=algorithm, max_tokens_per_gpu=most)
        result = engine.train(batch, num_steps=2, expected_version=0, input_digest="x")
        found[most] = (weights_of(engine), result.metrics)
    for key, tensor in found[None][0].items():
        torch.testing.assert_close(tensor, found[24][0][key], rtol=1e-5, atol=1e-6)
    for _, metrics in found.values():
        assert metrics["cov_picked"] > 0.15
    assert found[None][1]["cov_picked"] == pytest.approx(found[24][1]["cov_picked"])


def test_a_loss_that_picks_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import cairn\n"
        "@cairn.plugin(needs={'advantages', 'old_log_probs'}, picks=lambda a, p, config: a)\n"
        "def loss(log_probs, tokens, config):\n"
        "    return log_probs, {}\n"
    )
    batch = make_batch(4, old=True)
    with pytest.raises(BadPlugin, match=r"picks float32 of shape \(\d+,\): return \[\d+\] bool"):
        with_picked(batch, range(4), AlgorithmConfig(loss_type=f"{path}:loss"))
    with pytest.raises(TypeError, match="write both into needs"):
        plugin(needs={"advantages"}, picks=kl_cov.highest)
