"""On-policy distillation, from the teacher's folder to the advantages."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cairn.engines.fleet.fleet import _with_absolute_paths
from cairn.engines.training.top_k import split_rows
from cairn.engines.types.types import TrainBatch
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.batch.batch import arrays
from cairn.tasks.batch.scores import ScoreFile
from cairn.tasks.batch.source import SnapshotBatch
from cairn.tasks.steps import stale_steps
from examples.quickstart.model import build_model
from tests.local_fleet import LocalFleet
from tests.mistakes import mistakes
from tests.tasks.test_iteration import run_iterations
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

COEF = 0.3


def test_advantages_are_lowered_by_the_reverse_kl_and_then_normalised(tiny_assets: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    tokenizer.save_pretrained(teacher)
    build_model(tokenizer, seed=9).save_pretrained(teacher)
    config = tiny_config(
        tiny_assets,
        model={"path": str(tiny_assets / "model"), "teacher_path": str(teacher)},
        algorithm={"use_opd": True, "opd_kl_coef": COEF, "normalize_advantages": True, "use_rollout_logprobs": False},
    )
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        scored, estimated = (run.read(run.committed(0, step)) for step in (Step.SCORE, Step.ADVANTAGE))
        metrics = run.committed(0, Step.ADVANTAGE).metrics | run.committed(0, Step.SCORE).metrics
    difference = np.concatenate(arrays(scored, "log_probs")) - np.concatenate(arrays(scored, "teacher_log_probs"))
    assert np.abs(difference).max() > 0.1
    rewards = estimated.column("reward").to_numpy().reshape(-1, config.rollout.n_samples_per_prompt)
    of_samples = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    lengths = [len(values) for values in arrays(scored, "log_probs")]
    distilled = np.repeat(of_samples.ravel(), lengths) - COEF * difference
    expected = (distilled - distilled.mean()) / np.sqrt(distilled.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(arrays(estimated, "advantages")), expected, atol=1e-5)
    assert np.isclose(metrics["opd_reverse_kl"], difference.mean(), atol=1e-6)
    assert np.isclose(metrics["teacher_log_probs"], np.concatenate(arrays(scored, "teacher_log_probs")).mean())

    ledger = Ledger.open(open_store(str(tmp_path / "store")), "tiny")
    stale = {step for _, step, _, _ in stale_steps(ledger, config, {"teacher_model": "0" * 64})}
    assert stale == {"score", "advantage", "train", "sync"}


def test_its_most_probable_tokens_are_learned_from_as_they_were_said_and_the_same_after_a_restart(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, k = tmp_path / "teacher", 4
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    tokenizer.save_pretrained(teacher)
    build_model(tokenizer, seed=9).save_pretrained(teacher)
    config = tiny_config(
        tiny_assets,
        model={"path": str(tiny_assets / "model"), "teacher_path": str(teacher)},
        algorithm={"loss_type": "forward_kl_topk", "distillation_topk": k, "use_rollout_logprobs": False},
    )
    fleet, scores, learned = LocalFleet(config), list[list[np.ndarray]](), list[TrainBatch]()
    train, write = fleet.training.train, ScoreFile.write

    def writing(self: ScoreFile, reader: Any, batch: TrainBatch, found: dict[str, list[np.ndarray]]) -> Any:
        assert [*found] == ["teacher"]
        scores.append(found["teacher"])
        return write(self, reader, batch, found)  # type: ignore[arg-type]

    def training(batch: SnapshotBatch, **options: Any) -> Any:
        learned.append(batch.reader().whole())
        return train(batch, **options)

    fleet.training.train = training  # type: ignore[method-assign]
    monkeypatch.setattr(ScoreFile, "write", writing)
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 2, fleet)
    for rows, batch in zip(scores, learned, strict=True):
        for name, right in split_rows(rows, k, len(tokenizer)).items():
            found = getattr(batch, name)
            if name == "teacher_log_probs":
                assert found is None
                continue
            assert [one.dtype for one in found] == [one.dtype for one in right]
            assert all(map(np.array_equal, found, right))
    fleet.close()
    run_iterations(tmp_path / "resumed", config, 1)
    assert run_iterations(tmp_path / "resumed", config, 2) == undisturbed
    with tiny_context(str(tmp_path / "resumed"), config) as (run, _):
        assert run.read(run.committed(0, Step.SCORE)).column_names[2:] == [
            *("log_probs", "ref_log_probs", "teacher_top_log_probs", "teacher_top_ids")
        ]
        metrics = [run.committed(i, Step.TRAIN).metrics for i in (0, 1)]
    assert metrics[1]["loss"] < metrics[0]["loss"]
    assert 0 < metrics[0]["teacher_mass"] < 1


@pytest.mark.parametrize(
    ("model", "rollout", "says"),
    [
        ({"teacher_path": "large"}, {}, "are two teachers: leave one out"),
        (
            {},
            {"rollout_temperature": 0.7},
            "gives log-probs at temperature 1 over the whole vocabulary, but the policy",
        ),
        ({}, {"rollout_top_p": 0.9}, "leave out rollout.rollout_temperature, rollout_top_p and rollout_top_k"),
    ],
)
def test_a_server_gives_log_probs_of_what_the_policy_samples_from_or_is_refused(
    tiny_assets: Path, model: dict[str, Any], rollout: dict[str, Any], says: str
) -> None:
    whole = tiny_config(tiny_assets).rollout.model_dump()
    served = {"path": "m", "teacher_url": "http://large:30000/v1", "teacher_name": "large"}
    sections = {"model": served | model, "rollout": whole | rollout, "algorithm": {"use_opd": True}}
    with pytest.raises(ValueError, match=says):
        tiny_config(tiny_assets, **sections)


@pytest.mark.parametrize(
    ("model", "algorithm", "says"),
    [
        ({}, {"loss_type": "forward_kl_topk"}, "loss_type=forward_kl_topk needs a teacher: set model.teacher_path"),
        ({}, {"distillation_loss_coef": 1}, "distillation_loss_coef needs a teacher: set model.teacher_path"),
        ({"teacher_path": "t"}, {"use_opd": True, "distillation_topk": 8}, r"distillation_topk \(8\) has no effect"),
        (
            {"teacher_path": "t"},
            {"loss_type": "forward_kl_topk", "distillation_loss_coef": 1},
            r"distillation_loss_coef \(1.0\) has no effect while algorithm.loss_type is forward_kl_topk",
        ),
        (
            {"teacher_url": "http://t", "teacher_name": "t", "teacher_api": "openai"},
            {"loss_type": "forward_kl_topk", "distillation_topk": 8},
            r"teacher_api \(openai\) gives no log-probs of the most probable tokens",
        ),
    ],
)
def test_what_cannot_have_an_effect_is_said(model: dict[str, Any], algorithm: dict[str, Any], says: str) -> None:
    assert re.search(says, mistakes(model=model, algorithm=algorithm))


def test_a_group_of_one_is_enough_for_a_loss_that_compares_no_samples(tiny_assets: Path) -> None:
    whole = tiny_config(tiny_assets).rollout.model_dump()
    sections = {"model": {"path": "m", "teacher_path": "t"}, "rollout": whole | {"n_samples_per_prompt": 1}}
    algorithm = {"loss_type": "forward_kl_topk", "use_rollout_logprobs": False}
    assert tiny_config(tiny_assets, **sections, algorithm=algorithm).group_size == 1
    with pytest.raises(ValueError, match="every advantage would be zero"):
        tiny_config(tiny_assets, **sections, algorithm={"distillation_loss_coef": 1})


def test_actors_are_given_the_teachers_address_and_whole_paths_of_folders(tiny_assets: Path) -> None:
    served = {"path": "m", "teacher_url": "http://large:30000/v1", "teacher_name": "large"}
    model = _with_absolute_paths(tiny_config(tiny_assets, model=served, algorithm={"use_opd": True})).model
    assert model.path == str(Path.cwd() / "m")
    assert model.model_copy(update={"path": "m"}).model_dump(exclude_unset=True) == served
