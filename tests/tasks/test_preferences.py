"""A run that learns from preferences follows the gradient of the loss of direct preference optimization."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.training.aggregations.mean import weigh
from cairn.engines.training.collate import Tokens
from cairn.engines.training.losses.dpo import loss as loss_of_tokens
from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import METRICS, find_metric, iteration_metrics
from cairn.storage.ledger.commits import Step
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.advantages.dpo import preference_metrics
from cairn.tasks.advantages.step import estimate
from tests.local_fleet import LocalFleet
from tests.tasks.test_iteration import run_iterations
from tests.tiny_run import PROMPTS, DirectSteps, tiny_context

BETA = 0.3


def paper(
    chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7, as TRL's `sigmoid` loss writes it: the mean over pairs [P] of log-probs."""
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    return (-logsigmoid(BETA * logits) * (1 - smoothing) - logsigmoid(-BETA * logits) * smoothing).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_are_those_of_the_paper(smoothing: float) -> None:
    rng = np.random.default_rng(3)
    lengths = [3, 5, 1, 4, 7, 2]
    masks = [np.ones(n, np.uint8) for n in lengths]
    masks[1][2] = 0
    old, ref = ([rng.normal(-4, 3, n) for n in lengths] for _ in range(2))
    algorithm = AlgorithmConfig(advantage_estimator="dpo", dpo_beta=BETA, dpo_label_smoothing=smoothing)
    # The preferred sample is the first of a pair, or the second: the reward says which.
    batch = ScoredBatch(np.array([1, 0, 0, 1, 1, 0]), [2, 2, 2], masks, None, old, ref)
    advantages, returns = estimate(batch, algorithm)

    leaves = [torch.tensor(values, requires_grad=True) for values in old]
    sums, refs = (
        torch.stack([values[torch.tensor(mask).bool()].sum() for values, mask in zip(fields, masks, strict=True)])
        for fields in (leaves, [torch.tensor(values) for values in ref])
    )
    wanted = paper(sums[[0, 3, 4]], sums[[1, 2, 5]], refs[[0, 3, 4]], refs[[1, 2, 5]], smoothing)
    wanted.backward()

    trained = [mask.astype(bool) for mask in masks]
    counts = [int(mask.sum()) for mask in trained]
    log_probs = torch.tensor(np.concatenate([v[m] for v, m in zip(old, trained, strict=True)]), requires_grad=True)
    per_token: dict[str, Any] = {
        name: torch.tensor(np.concatenate([v[m] for v, m in zip(fields, trained, strict=True)]))
        for name, fields in (("advantages", advantages), ("returns", returns))
    }
    nothing = torch.zeros(0, dtype=torch.int64)
    tokens = Tokens(
        nothing,
        nothing,
        nothing,
        weights=torch.tensor(np.repeat(weigh(counts, algorithm), counts)),
        shares=torch.zeros(sum(counts)),
        samples=torch.tensor(np.repeat(np.arange(6), counts)),
        groups=torch.arange(6),
        counts=torch.tensor(counts),
        **per_token,
    )
    found = tokens.weighted_sum(loss_of_tokens(log_probs, tokens, algorithm)[0])
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    expected = np.concatenate([leaf.grad.numpy()[m] for leaf, m in zip(leaves, trained, strict=True)])  # type: ignore[union-attr]
    assert log_probs.grad is not None
    np.testing.assert_allclose(log_probs.grad.numpy(), expected, rtol=1e-6)
    assert preference_metrics(batch, algorithm)["dpo/loss"] == pytest.approx(wanted.item(), rel=1e-12)


def dpo_config(assets: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    rows = [
        {"prompt": prompt, "chosen": f"\\boxed{{{index}}}", "rejected": "\\boxed{" + "7 " * (index % 5) + "}"}
        for index, prompt in enumerate(PROMPTS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(assets / "model")},
        "data": {"path": str(folder / "pairs.jsonl")},
        "rollout": {"num_rollout": 2, "rollout_batch_size": 6},
        "algorithm": {"advantage_estimator": "dpo", "dpo_beta": BETA, "dpo_label_smoothing": 0.1},
        "training": {"lr": 1e-3, "num_threads": 1, "max_tokens_per_gpu": 64},
        "checkpoint": {"save_interval": 2},
        "tracking": {"tensorboard_dir": None},
    }
    return RunConfig.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def direct(folder: Path, reference: Path, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Loss and gradient norm of a model in a folder, over the rows of a rollout table: two samples a pair."""
    models = [AutoModelForCausalLM.from_pretrained(path).double().eval() for path in (folder, reference)]

    def sums(model: Any) -> torch.Tensor:
        found = []
        for row in rows:
            ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
            n = len(row["response_ids"])
            log_probs = model(ids).logits[0, -n - 1 : -1].log_softmax(-1)
            found.append(log_probs[torch.arange(n), ids[0, -n:]].sum())
        return torch.stack(found)

    own = sums(models[0])
    with torch.no_grad():
        ref = sums(models[1])
    loss = paper(own[::2], own[1::2], ref[::2], ref[1::2], 0.1)
    loss.backward()
    return loss.item(), float(torch.stack([p.grad.norm() for p in models[0].parameters()]).norm())


def test_a_run_takes_the_steps_of_the_paper_and_resumes_to_the_same(tiny_assets: Path, tmp_path: Path) -> None:
    config = dpo_config(tiny_assets, tmp_path)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path / "whole"), config, fleet=fleet) as (run, events):
        iteration(run, DirectSteps(run), 0)
        fleet.training.engine.export_hf(tmp_path / "weights")
        commits = iteration(run, DirectSteps(run), 1)
        rows = run.read(run.committed(1, Step.ROLLOUT, "00-000")).to_pylist()
        metrics = run.committed(1, Step.TRAIN).metrics
        digests = [run.committed(index, Step.TRAIN).state_digest for index in range(2)]
        shown = iteration_metrics(commits, config)
    assert fleet.rollout == []
    assert [name for name in events.executed() if name.startswith("000000/")] == [
        f"000000/{step}" for step in ("rollout.00-000", "filter.00", "score", "advantage", "train")
    ]
    loss, norm = direct(tmp_path / "weights", tiny_assets / "model", rows)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert shown["rollout/dpo/loss"] == pytest.approx(loss, rel=1e-5)
    assert [name for name in shown if find_metric(name) is None] == []
    assert {metric.name for metric in METRICS if "/dpo/" in metric.name} <= shown.keys()
    assert "rollout/trained/raw_reward" not in shown
    assert run_iterations(tmp_path / "resumed", config, 1) == digests[:1]
    assert run_iterations(tmp_path / "resumed", config, 2) == digests
