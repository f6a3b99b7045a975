"""Losses from outside the tree: of sequences, against their formula; and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.aggregations import token_weights
from cairn.engines.training.collate import collate_trained
from cairn.engines.training.losses.objective import loss_and_metrics
from cairn.engines.training.needs import is_policy_gradient, loss_needs, scores_needed
from cairn.engines.types.types import TrainBatch
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

CPU = torch.device("cpu")
GSPO = AlgorithmConfig(loss_type=f"{Path(__file__).parent / 'gspo.py'}:loss", eps_clip=0.05, eps_clip_high=0.1)
BATCH = dataclasses.replace(make_batch(10, old=True), groups=[7, 7, 7, 3, 3, 3, 3, 9, 9, 9])


def written(folder: Path, code: str) -> AlgorithmConfig:
    (folder / "mine.py").write_text(code)
    return AlgorithmConfig(loss_type=f"{folder / 'mine.py'}:loss")


def share(
    log_probs: list[torch.Tensor], batch: TrainBatch, samples: list[int]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Of a micro-batch in the loss of the whole batch."""
    weights = token_weights([int(mask.sum()) for mask in batch.loss_mask], GSPO)
    tokens = collate_trained(batch, samples, [weights[i] for i in samples], CPU)
    chosen = torch.cat([log_probs[i][torch.from_numpy(batch.loss_mask[i].astype(bool))] for i in samples])
    loss, metrics = loss_and_metrics(chosen, torch.zeros_like(chosen), tokens, GSPO)
    return loss, {name: float(value) for name, value in metrics.items()}


def formula(log_probs: list[torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """Sample by sample, as the paper has it."""
    assert batch.old_log_probs is not None
    assert batch.advantages is not None
    losses = []
    for i, mask in enumerate(batch.loss_mask):
        trained = torch.from_numpy(mask.astype(bool))
        ratio = (log_probs[i] - torch.from_numpy(batch.old_log_probs[i]))[trained].mean().exp()
        advantage = float(batch.advantages[i][0])
        losses.append(-min(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage, key=lambda value: value.item()))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("cuts", [[range(10)], [range(3), range(3, 10)], [[i] for i in range(9, -1, -1)]])
def test_a_loss_of_sequences_is_its_formula_however_the_batch_is_cut(cuts: list[range]) -> None:
    draw = np.random.default_rng(1)
    assert BATCH.old_log_probs is not None
    near = [torch.from_numpy(old + draw.normal(0, 0.3, len(old)).astype(np.float32)) for old in BATCH.old_log_probs]
    found, expected = ([values.clone().requires_grad_() for values in near] for _ in range(2))
    shares = [share(found, BATCH, list(cut)) for cut in cuts]
    loss, right = torch.stack([loss for loss, _ in shares]).sum(), formula(expected, BATCH)
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    loss.backward()
    right.backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    assert any(values.grad is not None and values.grad.abs().sum() == 0 for values in found), "none was clipped"
    assert sum(metrics["group"] for _, metrics in shares) == pytest.approx(np.mean(BATCH.groups))


def test_its_updates_are_the_same_in_micro_batches_of_any_size(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    # Adam makes a whole step of lr of a gradient that is all rounding, unless adam_eps is above the rounding.
    whole, small = (make_engine(folder, algorithm=GSPO, max_tokens_per_gpu=size, adam_eps=1e-5) for size in (None, 40))
    for version in range(2):
        results = [
            engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics
            for engine in (whole, small)
        ]
        assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)
    for name, tensor in weights_of(whole).items():
        torch.testing.assert_close(weights_of(small)[name], tensor, rtol=0, atol=1e-5)


def test_what_a_loss_needs_decides_what_is_scored_and_read(tmp_path: Path) -> None:
    code = "import cairn\n\n@cairn.plugin(needs={'ref_log_probs'})\ndef loss(log_probs, tokens, config):\n    pass\n"
    algorithm = written(tmp_path, code)
    assert scores_needed(algorithm) == {"ref_log_probs": "ref"}
    assert loss_needs(algorithm) == {"ref_log_probs": f"loss_type={algorithm.loss_type}"}
    assert not is_policy_gradient(algorithm)
    assert is_policy_gradient(GSPO)
    assert scores_needed(GSPO, num_steps=2) == {"old_log_probs": "actor"}


@pytest.mark.parametrize(
    "returned", ["None", "log_probs", "log_probs.sum(), {}", "log_probs, {'one': log_probs.mean()}"]
)
def test_a_loss_that_returns_something_else_is_named(tmp_path: Path, returned: str) -> None:
    algorithm = written(tmp_path, f"def loss(log_probs, tokens, config):\n    return {returned}\n")
    weights = token_weights([int(mask.sum()) for mask in BATCH.loss_mask], algorithm)
    tokens = collate_trained(BATCH, [0, 1], weights[:2], CPU)
    with pytest.raises(BadPlugin, match=r"loss' returned something else than \(losses, metrics\)"):
        loss_and_metrics(torch.zeros(len(tokens.targets)), None, tokens, algorithm)
