"""A run that learns from demonstrations is a run like any other, without what it has no need of."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.engines.training.factory import make_engine
from cairn.engines.types.types import TrainBatch
from cairn.flows.cli import app
from cairn.flows.history.rescore import changed_config as rescored_with
from cairn.flows.history.rescore import grader_override
from cairn.flows.iteration import iteration
from cairn.flows.reading.costs import run_costs
from cairn.flows.reading.lineage import lineage
from cairn.flows.reading.metrics import find_metric, iteration_metrics
from cairn.flows.report.data import read_samples, read_tokens
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.demonstrations import DemonstrationData
from cairn.tasks.data.opening import open_data
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.recovery import restore_trainer
from tests.local_fleet import LocalFleet
from tests.mistakes import said
from tests.tasks.test_iteration import run_iterations
from tests.tiny_run import PROMPTS, DirectSteps, killed_driver, tiny_context, train_digests


@pytest.fixture(scope="module")
def config(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = tmp_path_factory.mktemp("demonstrations") / "rows.jsonl"
    rows = [{"prompt": prompt, "response": f"\\boxed{{{index}}}"} for index, prompt in enumerate(PROMPTS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sft_config(tiny_assets, data)


def sft_config(assets: Path, rows: Path, **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(assets / "model")},
        "data": {"path": str(rows), "response_key": "response"},
        "rollout": {"num_rollout": 3, "rollout_batch_size": 6},
        "algorithm": {"loss_type": "sft_loss", "calculate_per_token_loss": True},
        "training": {"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": 2},
        "checkpoint": {"save_interval": 2},
        "tracking": {"tensorboard_dir": None},
    }
    return RunConfig.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return run_iterations(tmp_path_factory.mktemp("undisturbed"), config, 3)


def test_nothing_runs_that_is_not_needed(config: RunConfig, undisturbed: list[str | None], tmp_path: Path) -> None:
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, events):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        assert train_digests(run, range(3)) == undisturbed
        shown = iteration_metrics(run.ledger.commits(0), config)
        losses = [run.committed(index, Step.TRAIN).metrics["loss"] for index in range(3)]
        group = run.read(run.committed(0, Step.ROLLOUT, "00-000"), ["group_id"]).column("group_id")[0].as_py()
        traced = lineage(run.ledger, 0, group, 0, token=0)
        assert traced.token is not None
        assert (traced.sampled.log_prob, traced.token.log_prob, traced.token.ratio) == (None, None, None)
        samples = read_samples(run.ledger, lambda *traced: None)
        tokens = read_tokens(run.ledger, samples, [0, 7], lambda *traced: None)
        assert samples.rows.column("log_prob").null_count == 18
        assert tokens.column("log_prob").null_count == tokens.num_rows > 0
        costs = run_costs(run.ledger)
        trained = sum(run.committed(index, Step.TRAIN).metrics["tokens"] for index in range(3))
        assert (costs.generated_samples, costs.accepted_samples) == (0, 18)
        assert costs.tokens_per_accepted_sample == trained / 18
        console = CliRunner().invoke(app, ["costs", "tiny", "--store", str(tmp_path)]).stdout
        assert "18 samples of demonstrations trained on; each took" in console
        with pytest.raises(ConfigError, match="come from its data and were not graded"):
            rescored_with(run.ledger, [grader_override("exact_match")])
    steps = [f"{index:06d}/{step}" for index in range(3) for step in ("rollout.00-000", "filter.00", "train")]
    assert sorted(events.executed()) == sorted([*steps, "000001/checkpoint", "000002/checkpoint"])
    assert fleet.rollout == []
    assert {"rollout/cut_rows", "train/loss"} <= shown.keys()
    assert [name for name in shown if find_metric(name) is None] == []
    assert losses == sorted(losses, reverse=True)


def test_the_update_is_that_of_the_engine_on_the_same_tokens(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path
) -> None:
    engine = make_engine(config.model, config.training, config.algorithm, temperature=1.0, total_steps=6)
    with tiny_context(str(tmp_path), config) as (run, _):
        tokenizer = run.tokenizer
        iteration(run, DirectSteps(run), 0)
        prompts = run.read(run.committed(0, Step.ROLLOUT, "00-000")).column("prompt_index").to_pylist()
    batch: dict[str, list[Any]] = {"input_ids": [], "response_lengths": [], "loss_mask": []}
    for number in prompts:
        message = [{"role": "user", "content": PROMPTS[number]}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        response = tokenizer.encode(f"\\boxed{{{number}}}<|im_end|>", add_special_tokens=False)
        batch["input_ids"].append(np.array([*tokenizer.encode(text, add_special_tokens=False), *response], np.int32))
        batch["response_lengths"].append(len(response))
        batch["loss_mask"].append(np.ones(len(response), np.uint8))
    trained = engine.train(TrainBatch(**batch), num_steps=2, expected_version=0, input_digest="the same")
    assert trained.state_digest == undisturbed[0]


@pytest.mark.slow
def test_a_fresh_driver_goes_on_where_the_last_one_was_killed(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path
) -> None:
    killed_driver(str(tmp_path), config, Step.TRAIN)
    with tiny_context(str(tmp_path), config) as (run, _):
        assert run.find(1, Step.FILTER, "00") is not None
        assert run.find(1, Step.TRAIN) is None
    assert run_iterations(tmp_path, config, 3) == undisturbed
    with tiny_context(str(tmp_path), config) as (run, _):  # from the checkpoint of iteration 1, by a replay
        restore_trainer(run, run.committed(2, Step.TRAIN))
        assert run.fleet.training.position().state_digest == undisturbed[2]


def test_responses_end_with_the_token_that_the_generation_config_names(
    config: RunConfig, tiny_assets: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_assets / "model", model)
    tokenizer = load_tokenizer(str(model))
    for file in (model / "config.json", model / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.pad_token_id}))
    own = sft_config(
        tiny_assets,
        Path(config.data.path),
        model={"path": str(model)},
        data={"path": config.data.path, "response_key": "response", "apply_chat_template": False},
    )
    data = open_data(own, tokenizer)
    assert isinstance(data, DemonstrationData)
    assert data.row(0).samples[0].response_ids[-1] == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_rows_that_cannot_be_learned_are_passed_over_and_counted(
    config: RunConfig, tiny_assets: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": "a much longer answer " * 9},
        {"prompt": "c", "response": "d"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": str(data), "response_key": "response", "rollout_shuffle": False, "max_length": 40}
    tables, warnings = {}, {}
    for policy in ("pass_over", "truncate"):
        own = sft_config(
            tiny_assets,
            data,
            data={**options, "overlong": policy},
            rollout={"num_rollout": 2, "rollout_batch_size": 2},
            training={"lr": 1e-3, "num_threads": 1},
        )
        with tiny_context(str(tmp_path / policy), own, fleet=None) as (run, events):
            iteration(run, DirectSteps(run), 0)
            warnings[policy] = [event.text for event in events if isinstance(event, Message)]
            read = run.committed(0, Step.ROLLOUT, "00-000")
            rows_read = run.read(read, ["prompt_index", "status"]).to_pylist()
            tables[policy] = (
                [(row["prompt_index"], row["status"]) for row in rows_read],
                read.metrics["passed_over_prompts"],
                read.metrics["cut_rows"],
                read.values["cursor"],
            )
    assert tables == {
        "pass_over": ([(0, "completed"), (2, "completed")], 1, 0, 3),
        "truncate": ([(0, "completed"), (1, "truncated")], 0, 1, 2),
    }
    assert warnings["truncate"] == []
    (warning,) = warnings["pass_over"]
    assert warning.startswith("1 of the 3 rows read in iteration 0 were passed over")
    assert warning.endswith("raise data.max_length, or set data.overlong to truncate")


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("reward", "overlong_buffer_len", 4),
        ("reward", "reward_key", "score"),
        ("reward", "num_workers", 2),
        ("rollout", "num_engines", 2),
        ("rollout", "sglang", {"attention_backend": "torch_native"}),
        ("rollout", "rollout_stop", ["\n"]),
        ("rollout", "rollout_top_p", 0.9),
        ("fleet", "update_weight_buffer_size", 2**20),
    ],
)
def test_options_of_engines_and_graders_that_there_are_not_are_said(
    config: RunConfig, section: str, option: str, value: Any
) -> None:
    values = config.model_dump(mode="json")
    values[section][option] = value
    (warning,) = said(lambda note: parse(values, note=note))
    assert re.match(rf"{section}\.{option} (\(.*\) )?has no effect while algorithm\.loss_type is sft", warning)
    if option in ("overlong_buffer_len", "rollout_top_p"):  # of training alone
        return
    benchmark = {"name": "heldout", "path": "heldout.jsonl", "max_response_len": 4}
    values["eval"] = {"eval_interval": 2, "benchmarks": [benchmark]}
    parse(values)


def test_evaluations_sample_with_the_usual_engine(config: RunConfig, tiny_assets: Path, tmp_path: Path) -> None:
    benchmark = {"name": "heldout", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4}
    own = sft_config(
        tiny_assets,
        Path(config.data.path),
        rollout={"num_rollout": 2, "rollout_batch_size": 4},
        eval={"eval_interval": 2, "benchmarks": [benchmark]},
        reward={"rm_type": "exact_match"},
    )
    with tiny_context(str(tmp_path), own) as (run, events):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
    evaluated = [name for name in events.executed() if "/eval" in name or "/sync" in name]
    assert evaluated == ["000000/eval.heldout-v000000", "000001/sync", "000001/eval.heldout-v000004"]
