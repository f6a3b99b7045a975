"""`cairn train | resume | validate`: what is refused before anything starts, and how."""

import errno
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cairn.configs.loader import load
from cairn.flows.cli.app import describe, exit_code
from cairn.flows.driver.signals import EXIT_CODE, NOTICES
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.background import in_background
from tests.commands import cairn
from tests.flows.written_runs import new_run, write_iteration, write_run
from tests.small_disk import fill, small_disk, why_not
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

CAIRN = Path(sys.executable).with_name("cairn")


@pytest.fixture
def recipe(tiny_assets: Path, tmp_path: Path) -> Path:
    """A recipe of the tiny run that could start here."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_assets).model_dump(mode="json")))
    return path


def test_validate_prints_a_recipe_with_every_option_filled_in(recipe: Path, tmp_path: Path) -> None:
    result = cairn("validate", recipe, "--set", "training.lr=2e-4")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(
        f"{recipe} is fine: 3 iterations of 4 prompts × 4 samples, 1 optimizer step(s) of 16"
    )
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert load(printed) == load(recipe, ["training.lr=2e-4"])


def test_validate_prints_json_for_machines(recipe: Path) -> None:
    answer = json.loads(cairn("validate", recipe, "--json").stdout)
    assert answer["valid"] is True
    assert answer["config"]["rollout"]["n_samples_per_prompt"] == 4
    result = cairn("validate", recipe, "--json", "--set", "training.lr=0", "--set", "trianing.x=1")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "valid": False,
        "notes": [],
        "problems": [
            "training.lr is 0; it must be greater than 0",
            "trianing is not a section; did you mean training?",
        ],
    }


def test_an_option_without_effect_is_left_out_with_a_warning(recipe: Path) -> None:
    idle = ("--set", "algorithm.tis_clip=3.0")
    text = "algorithm.tis_clip (3.0) has no effect while algorithm.use_tis is false"
    for command in ("validate", "plan"):
        result = cairn(command, recipe, *idle)
        assert result.exit_code == 0
        assert result.stderr.startswith(f"warning: {text}")
    answer = json.loads(cairn("validate", recipe, *idle, "--json").stdout)
    assert answer["notes"][0].startswith(text)
    assert answer["config"]["algorithm"]["tis_clip"] == 2.0
    assert load(recipe, ["algorithm.tis_clip=3.0"]) == load(recipe)


def test_validate_without_files_checks_what_needs_none(recipe: Path, tmp_path: Path) -> None:
    elsewhere = ("--no-files", "--set", f"model.path={tmp_path}/Qwen3-4B", "--set", "data.path=there.jsonl")
    assert cairn("validate", recipe, *elsewhere).exit_code == 0
    layout = ("--set", "training.engine=megatron", "--set", "training.world_size=16")
    heads = "training.megatron={tensor_model_parallel_size: 16, attention_dropout: 0.1}"
    result = cairn("validate", recipe, *elsewhere, *layout, "--set", heads)
    assert result.exit_code == 2
    assert "which must divide the model's 32 attention heads and 8 key-value heads" in result.stderr
    assert "training.megatron.attention_dropout cannot be set" in result.stderr


def test_validate_looks_at_model_and_data_too(recipe: Path, tmp_path: Path) -> None:
    result = cairn("validate", recipe, "--set", f"model.path={tmp_path}/none")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"model.path: Model folder {tmp_path}/none does not exist")
    result = cairn("validate", recipe, "--set", "data.label_key=answer")
    assert result.exit_code == 2
    assert result.stderr.startswith("data: ")
    assert "answer" in result.stderr


def test_train_refuses_a_bad_recipe_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = cairn("train", recipe, "--store", store, "--set", "rollout.rollout_batchsize=1")
    assert result.exit_code == 2
    meant = "rollout.rollout_batchsize is not an option; did you mean rollout.rollout_batch_size?"
    assert result.stderr.splitlines()[1:3] == [f"what happened  {meant}", "what stands    nothing was started"]
    assert not store.exists()
    following = shlex.split(result.stderr.splitlines()[-2])
    validate = following[following.index("cairn") + 1 :]
    assert validate[0] == "validate"
    assert cairn(*validate).exit_code == 0, "the next command has the option that was meant"


def test_train_refuses_a_missing_model_before_a_run_exists(recipe: Path, tmp_path: Path) -> None:
    result = cairn("train", recipe, "--store", tmp_path, "--set", "model.path=no/such/model")
    assert result.exit_code == 2
    assert "Model folder no/such/model does not exist" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_train_refuses_a_name_that_cannot_be_a_folder(recipe: Path, tmp_path: Path) -> None:
    result = cairn("train", recipe, "--run", "a/b", "--store", tmp_path)
    assert result.exit_code == 2
    assert "run 'a/b' is not a usable name" in result.stderr


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="needs a folder that even root cannot write to")
def test_train_refuses_a_store_that_cannot_be_written(recipe: Path) -> None:
    result = cairn("train", recipe, "--store", "/sys/cairn")
    assert result.exit_code == 2
    assert "/sys/cairn" in result.stderr
    assert "Traceback" not in result.stderr


def test_train_refuses_a_store_that_is_a_file(recipe: Path) -> None:
    result = cairn("train", recipe, "--store", recipe)
    assert result.exit_code == 2
    assert str(recipe) in result.stderr
    assert "Traceback" not in result.stderr


def test_train_shows_how_an_existing_run_differs_and_leaves_it_alone(recipe: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    Ledger.create(store, "tiny", load(recipe).model_dump(mode="json"), {})
    result = cairn("train", recipe, "--store", tmp_path, "--set", "training.lr=0.5", "--set", "seed=7")
    assert result.exit_code == 2
    for line in (
        "the run exists with another configuration:",
        "  seed: 42 in the ledger, 7 requested",
        "  training.lr: 0.001 in the ledger, 0.5 requested",
        "Continue with the ledger's configuration (`cairn resume`), set the recorded values, choose another --run, ",
    ):
        assert line in result.stderr
    assert f"--run tiny-2 --store {tmp_path}" in result.stderr
    assert Ledger.open(store, "tiny").last_iteration() is None


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_finished_run_is_left_as_it_is(command: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"tracking": {"tensorboard_dir": None}}
    ledger = new_run(str(tmp_path), "done", **sections)
    write_run(ledger, 3)
    ledger.lease.release(Outcome.COMPLETED)
    recipe = tmp_path / "done.yaml"
    recipe.write_text(yaml.safe_dump(ledger.manifest.config))
    result = cairn(command, recipe if command == "train" else "done", "--store", tmp_path)
    assert result.exit_code == 0
    assert result.stderr == "run done has all its iterations; nothing is left to do\n"


def test_resume_names_what_is_gone_since_the_run_began(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    ledger.lease.release(Outcome.STOPPED)
    result = cairn("resume", "toy", "--store", tmp_path)
    assert result.exit_code == 2
    assert "model.path: Model folder model does not exist" in result.stderr


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_full_disk_is_a_failure_and_no_bad_input(recipe: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**16) as disk:
        fill(disk)
        result = cairn("train", recipe, "--run", "new", "--store", disk)
    assert result.exit_code == 1
    assert re.search(rf"happened  cannot create {disk}/\S+: no space is left on the device; free some\n", result.stderr)
    unnamed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/file")
    assert exit_code(unnamed) == 1
    assert describe(unnamed) == "no space is left: [Errno 28] No space left on device: '/file'; free some"


@pytest.mark.proof
@pytest.mark.parametrize("signum", [NOTICES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in NOTICES[1:])])
def test_a_notice_that_comes_before_there_is_a_run_ends_a_driver_as_preempted_too(
    tmp_path: Path, signum: signal.Signals
) -> None:
    recipe = tmp_path / "recipe.yaml"
    os.mkfifo(recipe)
    with in_background(CAIRN, "train", recipe, cwd=tmp_path) as driver, recipe.open("w"):
        # A signal between Python's last look for one and the blocking read would be seen only once the read ends.
        wait_for(lambda: psutil.Process(driver.pid).status() == psutil.STATUS_SLEEPING)
        driver.send_signal(signum)
        _, errors = driver.communicate(timeout=60)
    assert (driver.returncode, errors) == (EXIT_CODE, "preempted before the run was opened; run the command again\n")
