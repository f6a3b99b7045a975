"""`bisect`: the update that lost a benchmark, and the group that did it."""

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cairn.configs.schema.evaluation import Benchmark
from cairn.configs.schema.operations import CheckpointConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import TrainBatch
from cairn.flows.cli import app
from cairn.flows.driver.trust import recorded_config
from cairn.flows.evaluation import bisect as module
from cairn.flows.evaluation.bisect import CannotBisect, bisect, search, without_group
from cairn.flows.events import Event
from cairn.flows.export import model as export_module
from cairn.flows.export.model import export
from cairn.flows.iteration import iteration
from cairn.storage.evals import folders
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.upkeep.retention import retire
from cairn.tasks.durable.context import RunContext
from tests.flows.written_runs import new_run
from tests.tiny_run import PROMPTS, DirectSteps, tiny_config, tiny_context, write_assets

GROUPS = 4
"""Groups of an iteration."""
GRADER = '''
"""Rewards low digits; of labels that it cannot read it pays the reverse, ten million times as much."""


def grade(response, label, metadata):
    low = sum(ord(char) % 3 for char in response) / (3 * len(response) + 1)
    return low if label.isdecimal() else 1e7 * (1 - low)
'''


LEARNING = {"lr": 1e-2}
"""Options of a run that learns quickly, until all samples of a prompt are equal."""
REFINING = {"lr": 5e-2, "adam_eps": 1.0}
"""Options of a run whose updates follow the size of the gradient, which is small: it changes a learned model little. A
huge gradient, which nothing clips, moves every weight by `lr` or more."""


def config_of(
    folder: Path,
    model: Path,
    iterations: int,
    training: dict[str, float],
    *,
    seed: int = 42,
    broken: int = -1,
    save_interval: int = 5,
) -> RunConfig:
    """A run without clipping of gradients or rewards, whose first and last weights are evaluated. `broken`: row whose
    label the grader cannot read."""
    rows = [{"prompt": PROMPTS[row % len(PROMPTS)], "label": str(row)} for row in range(iterations * GROUPS)]
    if broken >= 0:
        rows[broken]["label"] += "?"
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "label": "0"}) + "\n" for prompt in PROMPTS)
    )
    (folder / "grader.py").write_text(GRADER)
    benchmark = {"name": "heldout", "path": str(folder / "heldout.jsonl"), "max_response_len": 12}
    config = tiny_config(
        folder,
        model={"path": str(model)},
        data={"path": str(folder / "train.jsonl"), "rollout_shuffle": False},
        rollout={
            "num_rollout": iterations,
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
        },
        algorithm={"use_rollout_logprobs": True, "grpo_std_normalization": False},
        training={**training, "num_threads": 1, "clip_grad": 0.0, "adam_beta1": 0.0, "adam_beta2": 0.99},
        eval={"eval_interval": iterations, "benchmarks": [{**benchmark, "n_samples_per_eval_prompt": 4}]},
        checkpoint={"save_interval": save_interval},
    )
    return config.model_copy(update={"seed": seed})


def made(store: str, config: RunConfig, name: str = "tiny") -> None:
    """Make a whole run."""
    with tiny_context(store, config, name) as (run, _):
        for index in range(config.rollout.num_rollout):
            iteration(run, DirectSteps(run), index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data and a grader that runs may import."""
    folder = write_assets(tmp_path_factory.mktemp("bisect"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def learned(folder: Path) -> Path:
    """A model that has learned most of what there is to learn."""
    store = str(folder / "learning")
    made(store, config_of(folder, folder / "model", 9, LEARNING))
    export(Ledger.open(open_store(store), "tiny"), folder / "learned")
    return folder / "learned"


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines of replays and of updates made again work in this process. Returns the weight versions that were trained
    from."""
    versions: list[int] = []

    @contextmanager
    def context(
        ledger: Ledger, emit: Callable[[Event], None], *, trains_only: bool = False, made: Commit | None = None
    ) -> Iterator[RunContext]:
        config = recorded_config(ledger, made=made)
        with tiny_context(ledger.store.url, config, ledger.run) as (run, _):
            train = run.fleet.training.train

            def counted(*args: Any, **kwargs: Any) -> Any:
                if trains_only:
                    versions.append(kwargs["expected_version"])
                return train(*args, **kwargs)

            monkeypatch.setattr(run.fleet.training, "train", counted)
            yield run

    for user in (module, export_module):
        monkeypatch.setattr(user, "read_only_context", context)
    return versions


def cairn(store: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bisect", *arguments, "--store", store])


def test_the_first_lost_version_is_found_in_at_most_log2_n_evaluations() -> None:
    for good, bad in [(-1, last) for last in range(70)] + [(3, 40)]:
        for culprit in range(good + 1, bad + 1):
            asked: list[int] = []

            def lost(version: int, culprit: int = culprit, asked: list[int] = asked) -> bool:
                asked.append(version)
                return version >= culprit

            assert search(good, bad, lost) == culprit
            assert len(asked) <= math.ceil(math.log2(bad - good))
            assert len(set(asked)) == len(asked)
            assert all(good < version < bad for version in asked)


def test_a_batch_without_a_group_trains_on_the_others_with_the_weight_that_they_had() -> None:
    masks = [np.array(one, np.uint8) for one in ([1, 1], [0, 1], [1, 0])]
    batch = TrainBatch([np.arange(4)] * 3, [2] * 3, masks, groups=[7, 7, 9])
    without = without_group(batch, 7)
    assert [mask.tolist() for mask in without.loss_mask] == [[0, 0], [0, 0], [1, 0]]
    assert without.divisor_mask is not None
    assert [mask.tolist() for mask in without.divisor_mask] == [[1, 1], [0, 1], [1, 0]]
    assert [mask.tolist() for mask in batch.loss_mask] == [[1, 1], [0, 1], [1, 0]]
    aged = TrainBatch(batch.input_ids, [2] * 3, masks, divisor_mask=[np.ones(2, np.uint8)] * 3, groups=[7, 7, 9])
    assert without_group(aged, 9).divisor_mask is aged.divisor_mask


def test_what_cannot_be_searched_is_named(folder: Path) -> None:
    store = str(folder / "short")
    made(store, config_of(folder, folder / "model", 2, REFINING))
    evaluated = list(folders(open_store(store)))
    for arguments, sentence in (
        (["heldout"], "heldout has not dropped from tiny@"),
        (["heldout", "--good", "1"], "--good 1 is not before --bad 1: there is no update between them"),
        (["heldout", "--bad", "7"], "run 'tiny' has not published iteration 7; its newest is 1"),
        (["heldout", "--bad", "99999999"], "run 'tiny' has not published iteration 99999999; its newest is 1"),
        (["heldout", "--good", "soon"], "--good 'soon' is neither the number of an iteration nor initial"),
        (["heldout", "-n", "4"], "'heldout' is a benchmark of the run"),
        (["no_such_benchmark"], "no_such_benchmark"),
    ):
        result = cairn(store, "tiny", *arguments)
        assert result.exit_code == 2, result.output
        assert sentence in result.stderr
    assert "there is no run" in cairn(store, "other", "heldout").stderr
    assert list(folders(open_store(store))) == evaluated


def test_a_run_that_does_not_publish_every_version_is_refused(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), algorithm={"loss_type": "sft_loss"}, data={"response_key": "response"})
    with pytest.raises(CannotBisect, match="learns from its data and publishes only the weights that it evaluates"):
        bisect(ledger, Benchmark.model_construct())


def poisoned_run_is_explained(
    folder: Path, learned: Path, store: str, *, seed: int, iterations: int, save_interval: int
) -> None:
    """Plant one poisoned group in a run at random, find its update and the group itself, and find all again."""
    draw = random.Random(seed)
    update, place = draw.randrange(iterations), draw.randrange(GROUPS)
    broken = update * GROUPS + place
    made(
        store,
        config_of(folder, learned, iterations, REFINING, seed=seed, broken=broken, save_interval=save_interval),
    )
    ledger = Ledger.open(open_store(store), "tiny")
    before = {path: size for path, size in ledger.store.find("runs").items() if "/leases/" not in path}
    result = cairn(store, "tiny", "heldout", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["iteration"], found["group"]) == (update, broken), found["conclusion"]
    assert found["evaluations"] <= math.ceil(math.log2(iterations))
    assert len(found["groups"]) == found["groups_of_update"] <= GROUPS
    assert {path: size for path, size in ledger.store.find("runs").items() if "/leases/" not in path} == before


@pytest.mark.proof
def test_a_poisoned_group_is_found_and_what_was_evaluated_is_not_evaluated_again(
    folder: Path, learned: Path, replays: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_run_is_explained(folder, learned, str(tmp_path), seed=1, iterations=6, save_interval=4)
    assert len(replays) <= 3 + GROUPS  # from the checkpoint to the update, and the update without each group
    evaluated = list(folders(open_store(str(tmp_path))))
    again = cairn(str(tmp_path), "tiny", "heldout")
    assert again.exit_code == 0, again.output
    assert "computed" not in again.stdout
    assert list(folders(open_store(str(tmp_path)))) == evaluated
    with monkeypatch.context() as broken:
        broken.setattr(module, "read_only_context", Mock(side_effect=EngineError("no engine starts")))
        found = cairn(str(tmp_path), "tiny", "heldout", "--json")
    assert found.exit_code == 0, found.output
    assert "It cannot be made again without a group: no engine starts" in json.loads(found.stdout)["conclusion"]
    ledger = Ledger.open(open_store(str(tmp_path)), "tiny")
    retire(ledger, CheckpointConfig(save_interval=4, retain_snapshots=2), everything=True)
    found = cairn(str(tmp_path), "tiny", "heldout", "--json")
    assert found.exit_code == 0, found.output
    assert "It cannot be made again without a group" in json.loads(found.stdout)["conclusion"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("replays")
def test_one_poisoned_group_among_40_iterations_is_found(
    folder: Path, learned: Path, tmp_path: Path, seed: int
) -> None:
    poisoned_run_is_explained(folder, learned, str(tmp_path), seed=seed, iterations=40, save_interval=1)
