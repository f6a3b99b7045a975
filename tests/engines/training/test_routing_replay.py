"""What the rollout's mixtures of experts chose is what the trainer's are given: routing replay on the torch engine."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types.types import Completion, SamplingParams, TrainBatch
from tests.architectures import VOCABULARY, architecture
from tests.engines.rollout.models import rollout_config
from tests.engines.training.builders import make_engine, part_of, sampled_tokens
from tests.requests import group

REPLAY = AlgorithmConfig(use_rollout_routing_replay=True)
FAMILIES = ("qwen3_moe", "deepseek_v3")
EXPERTS = 8
"""At least as many as this have each of their layers."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architecture(request.param).save(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def sampled(folder: Path) -> TrainBatch:
    """What a rollout engine in bfloat16 samples, with the experts of its tokens."""
    return sampled_batch(folder)


def sampled_batch(folder: Path, dtype: str = "bfloat16") -> TrainBatch:
    engine = TransformersEngine(str(folder), rollout_config(dtype=dtype))
    draw = np.random.default_rng(0)
    params = SamplingParams(20, return_routed_experts=True)
    prompts = [draw.integers(3, VOCABULARY, size=5 + 3 * i).tolist() for i in range(4)]
    requests = [one for i, prompt in enumerate(prompts) for one in group(i, prompt, (1, 2), params)]
    done: list[Completion] = [c for part in engine.generate(requests) for c in part]
    return dataclasses.replace(sampled_tokens(prompts, done, draw), routed_experts=[c.routed_experts for c in done])


def apart(engine: TorchEngine, batch: TrainBatch) -> float:
    """The largest difference of the actor's log-probs from the rollout's."""
    scored = np.concatenate(engine.score(batch, "actor"))
    return float(np.abs(scored - np.concatenate(batch.rollout_log_probs or [])).max())


def own_choices(engine: TorchEngine, batch: TrainBatch) -> list[np.ndarray]:
    """The choices of the engine's model for each sample alone, as the library reports its router's scores."""
    found = []
    for ids in batch.input_ids:
        routes: list[torch.Tensor] = []
        hooks = [
            block.experts.register_forward_pre_hook(lambda module, args, routes=routes: routes.append(args[1]))
            for block in engine._model.modules()
            if isinstance(getattr(block, "experts", None), torch.nn.Module)
        ]
        with torch.no_grad():
            engine._model(input_ids=torch.from_numpy(ids[None]).long())
        for hook in hooks:
            hook.remove()
        found.append(torch.stack(routes, 1)[:-1].numpy().astype(np.uint8))
    return found


def test_the_trainer_follows_the_rollout_where_its_own_routing_would_not(folder: Path, sampled: TrainBatch) -> None:
    """In float32 another expert is chosen here and there than in bfloat16: that makes up most of the difference."""
    free, replayed = make_engine(folder), make_engine(folder, algorithm=REPLAY)
    assert sampled.routed_experts is not None
    differ = [
        np.sort(own, -1) != np.sort(recorded, -1)
        for own, recorded in zip(own_choices(free, sampled), sampled.routed_experts, strict=True)
        if recorded is not None
    ]
    assert np.concatenate(differ).mean() > 0, "the witness that free routing differs"
    assert apart(replayed, sampled) < 0.2 * apart(free, sampled)


def test_in_one_number_format_replayed_log_probs_are_the_rollouts(folder: Path) -> None:
    batch = sampled_batch(folder, "float32")
    scored = make_engine(folder, algorithm=REPLAY).score(batch, "actor")
    for one, reported in zip(scored, batch.rollout_log_probs or [], strict=True):
        assert np.abs(one - reported).max() < 2e-5


def test_to_be_given_ones_own_choices_changes_nothing(folder: Path, sampled: TrainBatch) -> None:
    engine, free = make_engine(folder, algorithm=REPLAY), make_engine(folder)
    own = dataclasses.replace(sampled, routed_experts=own_choices(free, sampled))
    for scored, expected in zip(engine.score(own, "actor"), free.score(sampled, "actor"), strict=True):
        assert scored.tobytes() == expected.tobytes()
    results = [
        one.train(b, num_steps=1, expected_version=0, input_digest="d") for one, b in ((engine, own), (free, sampled))
    ]
    assert results[0].state_digest == results[1].state_digest
    assert results[0].metrics["routing_mismatch"] == 0
    assert "routing_mismatch" not in results[1].metrics


def test_other_choices_give_other_log_probs_and_say_how_many(folder: Path, sampled: TrainBatch) -> None:
    engine, free = make_engine(folder, algorithm=REPLAY), make_engine(folder)
    own = own_choices(free, sampled)
    other = [experts.copy() for experts in own]
    for experts in other:
        unchosen = [e for e in range(EXPERTS) if e not in experts[0, 0]]
        experts[0, 0, 0] = unchosen[0]
    changed = dataclasses.replace(sampled, routed_experts=other)
    assert all(
        np.abs(one - two).max() > 1e-5
        for one, two in zip(engine.score(changed, "actor"), free.score(sampled, "actor"), strict=True)
    )
    metrics = engine.train(changed, num_steps=1, expected_version=0, input_digest="d").metrics
    # The first layer's router sees the embeddings alone; what it is given changes what later layers choose.
    assert metrics["routing_mismatch"] >= len(other) / sum(experts.size for experts in other)


def test_samples_without_choices_are_routed_freely_beside_those_that_have_them(
    folder: Path, sampled: TrainBatch
) -> None:
    engine, free = make_engine(folder, algorithm=REPLAY), make_engine(folder)
    assert sampled.routed_experts is not None
    mixed = dataclasses.replace(sampled, routed_experts=[None, *sampled.routed_experts[1:]])
    scored, replayed = engine.score(mixed, "actor"), engine.score(sampled, "actor")
    np.testing.assert_allclose(scored[0], free.score(part_of(sampled, slice(0, 1)), "actor")[0], atol=1e-5)
    assert all(np.array_equal(one, two) for one, two in zip(scored[1:], replayed[1:], strict=True))


def test_layers_that_are_computed_again_are_given_the_same_choices(folder: Path, sampled: TrainBatch) -> None:
    digests = [
        make_engine(folder, algorithm=REPLAY, gradient_checkpointing=recomputes)
        .train(sampled, num_steps=1, expected_version=0, input_digest="d")
        .state_digest
        for recomputes in (False, True)
    ]
    assert digests[0] == digests[1]


def test_a_batch_with_choices_for_other_tokens_is_refused(folder: Path, sampled: TrainBatch) -> None:
    assert sampled.routed_experts is not None
    assert sampled.routed_experts[0] is not None
    short = dataclasses.replace(sampled, routed_experts=[sampled.routed_experts[0][1:], *sampled.routed_experts[1:]])
    with pytest.raises(ValueError, match="routed_experts of sample 0 has"):
        make_engine(folder, algorithm=REPLAY).score(short, "actor")


def test_layers_whose_experts_follow_from_the_tokens_need_no_replay(tmp_path: Path) -> None:
    folder = architecture("deepseek_v4").save(tmp_path)
    assert apart(make_engine(folder, algorithm=REPLAY), sampled_batch(folder, "float32")) <= 1e-4
