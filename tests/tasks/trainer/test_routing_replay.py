"""A run with routing replay: which experts the rollout chose is committed with the samples, and trained with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.configs.schema.run import RunConfig
from cairn.engines.models.routing import bias_problems, replay_problems
from cairn.engines.types.trajectories import Segment, Trajectory
from cairn.engines.types.types import FinishReason, TrainBatch
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import ROUTED
from cairn.tasks.batch.sequences import routed_column, routes_of, split_trajectories
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.selection import last_selection
from tests.architectures import architecture
from tests.tasks.generation.test_partial_rollout import PARTIAL
from tests.tiny_run import DirectSteps, killed_driver, tiny_config, tiny_context, train_digests, write_assets
from tests.vision import dots

LAYERS, TOP_K, EXPERTS = 2, 3, 8


@pytest.fixture(scope="module")
def moe_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the tiny run, its model a mixture of experts."""
    folder = write_assets(tmp_path_factory.mktemp("moe"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = architecture("qwen3_moe").make_config()
    config.update({"num_hidden_layers": LAYERS, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


def replay_config(assets: Path, **rollout: object) -> RunConfig:
    """Samples in bfloat16, so that the trainer, in float32, would choose otherwise here and there."""
    return tiny_config(
        assets,
        rollout={"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 12}
        | {"dtype": "bfloat16"}
        | rollout,
        algorithm={"use_rollout_routing_replay": True, "use_rollout_logprobs": False, "use_tis": True},
        training={"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": 2},
    )


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_weights_and_its_batch_has_the_experts_of_every_token(
    moe_assets: Path, tmp_path: Path
) -> None:
    config = replay_config(moe_assets)
    undisturbed, resumed = str(tmp_path / "undisturbed"), str(tmp_path / "resumed")
    with tiny_context(undisturbed, config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        expected = train_digests(run, range(2))
        (rollout,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT]
        for row in run.read(rollout).to_pylist():
            experts = routes_of(row[ROUTED.name])
            assert experts is not None
            assert experts.shape == (len(row["prompt_ids"]) + len(row["response_ids"]) - 1, LAYERS, TOP_K)
            assert experts.dtype == np.uint8
            assert (np.diff(np.sort(experts, -1)) > 0).all(), "an expert is chosen once"
        batch = train_batch(run, last_selection(run, 0), [rollout])
        assert batch.routed_experts is not None
        (train,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.TRAIN]
        assert 0 < train.metrics["routing_mismatch"] < 0.2
    killed_driver(resumed, config, Step.TRAIN)
    with tiny_context(resumed, config) as (run, _):
        iteration(run, DirectSteps(run), 1)
        assert train_digests(run, range(2)) == expected


def test_without_replay_the_same_run_ends_with_other_weights(moe_assets: Path, tmp_path: Path) -> None:
    digests = []
    for replays in (True, False):
        config = replay_config(moe_assets)
        algorithm = config.algorithm.model_copy(update={"use_rollout_routing_replay": replays})
        with tiny_context(str(tmp_path / str(replays)), config.model_copy(update={"algorithm": algorithm})) as (run, _):
            iteration(run, DirectSteps(run), 0)
            digests += train_digests(run, range(1))
            (rollout,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT]
            assert (ROUTED.name in run.read(rollout).column_names) is replays
    assert digests[0] != digests[1]


@pytest.mark.parametrize("cut_tokens", [pytest.param(None, marks=pytest.mark.slow), 9])
def test_a_sample_that_is_continued_keeps_the_experts_of_its_first_tokens(
    moe_assets: Path, tmp_path: Path, cut_tokens: int | None
) -> None:
    config = replay_config(moe_assets, **PARTIAL, cut_tokens=cut_tokens)
    with tiny_context(str(tmp_path), config) as (run, _):
        parts: dict[tuple[int, int], np.ndarray] = {}
        continued = 0
        for index in range(2):
            iteration(run, DirectSteps(run), index)
            for commit in [commit for commit in run.ledger.commits(index) if commit.step is Step.ROLLOUT]:
                for row in run.read(commit).to_pylist():
                    experts, key = routes_of(row[ROUTED.name]), (row["group_id"], row["sample_index"])
                    if experts is None:
                        assert not row["response_ids"]
                        continue
                    assert len(experts) == len(row["prompt_ids"]) + len(row["response_ids"]) - 1
                    before = parts.pop(key, None)
                    if before is not None:
                        assert np.array_equal(experts[: len(before)], before)
                        continued += len(before) < len(experts)
                    if row["status"] == "aborted":
                        parts[key] = experts
    assert continued > 0, "the witness that a sample was continued after tokens"


def routes(length: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.argsort(draw.random((length, LAYERS, EXPERTS)), -1)[..., :TOP_K].astype(np.uint8)


def segment(length: int, experts: np.ndarray | None = None) -> Segment:
    ids = np.zeros(length, np.int32)
    if experts is None:
        return Segment.given(ids)
    numbers = np.zeros(length, np.float32), np.zeros(length, np.int32)
    sampled = Segment(ids, np.ones(length, np.uint8), "0", *numbers, 1, FinishReason.STOP)
    return replace(sampled, routed_experts=experts)


def test_a_token_has_the_experts_of_the_call_that_read_it_first() -> None:
    """A prompt of 5, 4 sampled, 3 given, 2 sampled, 6 given after which nothing is sampled."""
    first, second = routes(8, 1), routes(13, 2)
    trajectory = Trajectory([segment(4, first), segment(3), segment(2, second), segment(6)])
    found = trajectory.routed_experts(5)
    assert found is not None
    assert found.shape == (5 + 15 - 1, LAYERS, TOP_K)
    assert np.array_equal(found[:8], first)
    assert np.array_equal(found[8:13], second[8:])
    assert Trajectory([segment(3)]).routed_experts(5) is None


def test_the_column_gives_back_what_it_was_given_of_several_trajectories() -> None:
    several = [routes(8, 1), routes(6, 2)]  # a prompt of 5, and responses of 4 and 2 tokens
    wide = (routes(7, 3).astype(np.uint16) + 300,)
    column = routed_column([several, wide, [None], [routes(3, 4), None]])
    assert column.type == ROUTED.type
    found = [routes_of(value.as_py()) for value in column]
    assert found[0] is not None
    assert np.array_equal(found[0], np.concatenate(several))
    assert found[1] is not None
    assert np.array_equal(found[1], wide[0])
    assert found[2] is found[3] is None
    batch = TrainBatch([np.zeros(11, np.int32)], [6], [np.ones(6, np.uint8)], routed_experts=[np.concatenate(several)])
    split = split_trajectories(batch, [[4, 2]]).routed_experts
    assert split is not None
    assert all(np.array_equal(one, two) for one, two in zip(split, several, strict=True))  # type: ignore[arg-type]


def test_a_model_without_experts_is_refused(tiny_assets: Path, tmp_path: Path) -> None:
    (problem,) = setup_problems(replay_config(tiny_assets))
    assert "has no mixture of experts" in problem
    (problem,) = replay_problems(str(dots(tmp_path) / "untrained"), {})
    assert "(qwen2_5_vl) has no mixture of experts" in problem


def test_what_would_choose_in_the_place_of_the_routers_is_refused(moe_assets: Path) -> None:
    options = {"engine": "megatron", "megatron": {"moe_router_fusion": True}}
    training = replay_config(moe_assets).training
    config = replay_config(moe_assets).model_copy(update={"training": training.model_copy(update=options)})
    problems = setup_problems(config)
    assert any("training.megatron.moe_router_fusion chooses experts in a kernel" in one for one in problems)


def test_a_rate_for_biases_that_the_routers_do_not_have_is_refused(moe_assets: Path, tmp_path: Path) -> None:
    config = replay_config(moe_assets)
    training = config.training.model_copy(update={"moe_router_bias_update_rate": 1e-3})
    (problem,) = setup_problems(config.model_copy(update={"training": training}))
    assert "rate is 0.001, and the routers of the model" in problem
    assert [*bias_problems(str(architecture("glm4_moe").save(tmp_path)), 1e-3)] == []
