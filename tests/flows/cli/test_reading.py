"""`cairn runs | status | show | verify`: what they print, for people and for machines, and how they refuse."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.configs.schema.rollout import MOST_ITERATIONS
from cairn.flows.cli import GROUPS, NAMES, app
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.layout import LAST_NUMBER
from cairn.storage.ledger.leases import Outcome
from tests.commands import cairn
from tests.flows.written_runs import new_run, write_iteration, write_run

CAIRN = Path(sys.executable).with_name("cairn")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with the finished run `toy` and the stopped run `other`."""
    toy = new_run(str(tmp_path))
    write_run(toy, 3)
    toy.lease.release(Outcome.COMPLETED)
    other = new_run(str(tmp_path), "other")
    write_iteration(other, 0)
    other.lease.release(Outcome.STOPPED)
    return str(tmp_path)


def test_status_prints_for_machines_what_they_need(store: str) -> None:
    result = cairn("status", "toy", "--json", "--store", store)
    assert result.exit_code == 0
    status = json.loads(result.stdout)
    assert status["run"] == "toy"
    assert status["state"] == "completed"
    assert status["iterations"] == 3
    assert status["weight_version"] == 3
    assert status["state_digest"] == f"{3:064x}"
    assert (status["reward"], status["trained_reward"]) == (2 / 3, 0.5)
    assert status["last_commit"] == "000002/eval.heldout-v000003"
    graded = {"first_graded": 0.25, "last_graded": 1.0, "first_failed": 0, "last_failed": 0}
    assert status["eval"] == {"heldout": {"first": 0.25, "last": 1.0, **graded}}
    assert status["driver"]["pid"] == os.getpid()
    assert status["balance"] is None, "of two iterations besides the first nothing can be said"


def test_status_prints_for_people_the_same(store: str) -> None:
    text = cairn("status", "other", "--store", store).stdout
    assert "interrupted" in text
    assert "1 of 3, in iteration 1 before rollout" in text
    assert f"{1:064x}" in text
    assert "0.250 → 0.250" in text
    assert f"pid {os.getpid()}" in text
    assert "stopped" in text


def test_runs_lists_every_run_of_the_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(cairn("runs", "--json", "--store", store).stdout)
    assert [(run["run"], run["state"], run["iterations"]) for run in listed] == [
        ("other", "interrupted", 1),
        ("toy", "completed", 3),
    ]
    monkeypatch.setenv("CAIRN_STORE", store)
    lines = cairn("runs").stdout.splitlines()
    assert lines[1].split()[:4] == ["other", "interrupted", "1/3", "0.667"]
    assert lines[2].split()[:4] == ["toy", "completed", "3/3", "0.667"]


def test_runs_are_sorted_and_filtered(store: str) -> None:
    def names(*options: str) -> list[str]:
        return [run["run"] for run in json.loads(cairn("runs", *options, "--json", "--store", store).stdout)]

    assert names("--sort", "iterations") == ["toy", "other"]
    assert names("--sort", "newest") == ["other", "toy"]
    assert names("t*") == names("--state", "completed") == ["toy"]
    assert names("--state", "completed", "--state", "interrupted", "--sort", "reward") == ["other", "toy"]
    wrong = cairn("runs", "--state", "done", "--store", store)
    assert (wrong.exit_code, wrong.stderr.startswith("--state done is not a state of a run; states are new, ")) == (
        2,
        True,
    )


def test_an_empty_store_has_no_runs(tmp_path: Path) -> None:
    assert cairn("runs", "--json", "--store", str(tmp_path)).stdout.strip() == "[]"
    assert cairn("runs", "--store", str(tmp_path)).stdout.startswith(
        f"no such runs in {tmp_path}; `cairn train RECIPE`"
    )


def test_show_prints_samples_with_their_reward_and_advantage(store: str) -> None:
    text = cairn("show", "toy@1", "--limit", "2", "--store", store).stdout
    assert "sample 0 of 6" in text
    assert "sample 1 of 6" in text
    assert "sample 2 of 6" not in text
    assert "[3] 2 + 2 =" in text
    assert "5 \\x1b[31m[bold]\\x7f\\x9b31m" in text, "no control characters and no markup of a model reach the terminal"
    assert "advantage -1.000" in text
    assert "reward 0.000" in text
    assert "label 4" in text
    assert "tokens 3 + 2" in text
    assert "2 of 6 samples" in text


def test_show_picks_one_sample_and_says_why_it_was_dropped(store: str) -> None:
    (view,) = json.loads(cairn("show", "toy@0/5", "--json", "--store", store).stdout)
    assert (view["number"], view["disposition"], view["reason"]) == (5, "drop", "zero_std_1")
    assert "drop (zero_std_1)" in cairn("show", "toy@0/5", "--store", store).stdout


def test_a_list_of_signers_that_is_not_there_is_named(store: str) -> None:
    result = cairn("verify", "toy", "--signers", "nosuch.txt", "--store", store)
    assert result.exit_code == 2
    assert "the file of signers nosuch.txt cannot be read: No such file or directory" in result.output


def test_json_for_machines_says_the_same_without_steering_a_terminal(store: str) -> None:
    shown = cairn("show", "toy@1/1", "--json", "--store", store).stdout
    assert json.loads(shown)[0]["response"] == "5 \x1b[31m[bold]\x7f\x9b31m"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


def test_verify_finds_nothing_in_a_sound_run(store: str) -> None:
    result = cairn("verify", "toy", "--store", store)
    assert result.exit_code == 0
    assert "every byte is what was committed" in result.stdout
    assert "groups: 6 trained on, 3 dropped (zero_std_1: 3), 0 open\n" in result.stdout
    report = json.loads(cairn("verify", "toy", "--json", "--store", store).stdout)
    # Per iteration 2 rollouts, 2 rewards, filter, advantage, train, sync; 2 checkpoints and 3 evaluations in all.
    assert report["commits"] == 3 * 8 + 2 + 3
    assert report["findings"] == []
    counts = {"trained": 6, "dropped": {"zero_std_1": 3}, "open": 0, "retired": [], "unreadable": []}
    assert report["groups"] == counts


def test_verify_names_what_was_altered_and_fails(store: str) -> None:
    file = next((Path(store) / "runs/toy/iterations/000001/reward").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    result = cairn("verify", "toy", "--store", store)
    assert result.exit_code == 1
    assert f"altered: runs/toy/iterations/000001/reward/{file.parent.name}/samples.parquet is altered" in result.stdout
    assert "1 finding\n" in result.stdout
    machine = cairn("verify", "toy", "--json", "--store", store)
    assert machine.exit_code == 1
    assert [finding["fault"] for finding in json.loads(machine.stdout)["findings"]] == ["altered"]


def test_status_says_who_waits_for_whom(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), rollout={"num_rollout": 5})
    write_run(ledger, 5)
    balance = json.loads(cairn("status", "toy", "--json", "--store", str(tmp_path)).stdout)["balance"]
    assert (balance["first"], balance["last"]) == (1, 4)
    assert 0 <= balance["trainer_wait"] <= 1
    assert all(isinstance(option, str) for option in balance["hints"])
    shown = cairn("status", "toy", "--store", str(tmp_path)).stdout
    assert f"balance          the trainer waits {100 * balance['trainer_wait']:.0f} % of the time" in shown
    ledger.store.write(layout.commit("toy", 2, Step.SYNC), b"{}")
    damaged = cairn("status", "toy", "--store", str(tmp_path))
    assert (damaged.exit_code, "balance" in damaged.stdout) == (0, False)


@pytest.mark.parametrize("command", [["status", "none"], ["show", "none@0"], ["verify", "none"], ["resume", "none"]])
def test_a_run_that_does_not_exist_is_one_sentence(tmp_path: Path, command: list[str]) -> None:
    result = cairn(*command, "--store", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == f"there is no run 'none' in {tmp_path}; `cairn runs` lists them\n"
    assert result.stdout == ""


def test_a_name_that_cannot_be_a_run_is_one_sentence(tmp_path: Path) -> None:
    result = cairn("status", "../x", "--store", str(tmp_path))
    assert result.exit_code == 2
    assert "run '../x' is not a usable name" in result.stderr


def test_samples_that_do_not_exist_are_one_sentence(store: str) -> None:
    result = cairn("show", "toy@9", "--store", store)
    assert (result.exit_code, result.stderr) == (
        2,
        "run 'toy' has no samples of iteration 9; its last iteration is 2\n",
    )
    result = cairn("show", "toy@0/6", "--store", store)
    assert (result.exit_code, result.stderr) == (2, "iteration 0 of run 'toy' has samples 0 to 5, not 6\n")


@pytest.mark.parametrize("command", [["show", "toy@1000000"], ["replay", "toy@1000000", "reward"]])
def test_an_iteration_that_no_ledger_can_number_is_bad_input(store: str, command: list[str]) -> None:
    assert MOST_ITERATIONS == LAST_NUMBER + 1
    result = cairn(*command, "--store", store)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)


def test_damage_is_named_and_fails(store: str) -> None:
    file = next((Path(store) / "runs/toy/iterations/000001/reward").rglob("*.parquet"))
    file.unlink()
    result = cairn("show", "toy@1", "--store", store)
    assert result.exit_code == 1
    assert "is committed but missing" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_of_an_unknown_kind_is_one_sentence() -> None:
    result = cairn("runs", "--store", "ftp://host/x")
    assert result.exit_code == 2
    assert result.stderr == "store ftp://… is of an unknown kind; give a folder or s3://bucket/prefix\n"


def test_the_executable_reads_a_store_on_s3(s3_url: str) -> None:
    ledger = new_run(s3_url)
    write_iteration(ledger, 0)
    printed = subprocess.run(
        [CAIRN, "status", "toy", "--json"], env=os.environ | {"CAIRN_STORE": s3_url}, capture_output=True, timeout=180
    )
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["state"] == "running"


@pytest.mark.parametrize("command", ["train", "resume", "validate", "runs", "status", "show", "verify"])
def test_every_command_teaches_with_an_example(command: str) -> None:
    text = cairn(command, "--help").stdout
    assert "Examples:" in text
    assert f"cairn {command}" in text


def test_help_lists_every_command_in_a_group_on_one_line(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).stdout
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len({*listed}) == len(app.registered_commands)
    for panel, functions in GROUPS.items():
        (start,) = [at for at, line in enumerate(text.splitlines()) if line.startswith(f"╭─ {panel} ")]
        shown = text.splitlines()[start + 1 : start + 1 + len(functions)]
        assert [line.split()[1] for line in shown] == [NAMES.get(one, one.__name__) for one in functions]
    assert cairn("--version").stdout.startswith("cairn 0.")
    completed = {"_CAIRN_COMPLETE": "complete_bash", "COMP_CWORD": "2", "CAIRN_STORE": store}
    for words, expected in (("cairn status t", "toy"), ("cairn train quickstart-m", "quickstart-megatron")):
        done = subprocess.run(
            [CAIRN], env=os.environ | completed | {"COMP_WORDS": words}, capture_output=True, text=True
        )
        assert expected in done.stdout.split(), done.stderr


def test_help_and_the_import_of_the_command_line_are_quick() -> None:
    heavy = "torch", "ray", "prefect", "transformers", "pyarrow", "numpy", "pydantic"
    code = f"import sys, cairn.flows.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout == "[]\n"
    before = _seconds_of_children()
    subprocess.run([CAIRN, "--help"], capture_output=True, check=True, timeout=120)
    assert _seconds_of_children() - before < 1


def _seconds_of_children() -> float:
    """CPU time of all child processes that have ended: it does not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


LOOKING = """
import sys
from cairn.flows.cli import app

store, *commands = sys.argv[1:]
for command in commands:
    app([*command.split(), "--store", store], standalone_mode=False)
    heavy = {"torch", "transformers", "ray", "prefect"} & set(sys.modules)
    assert not heavy, f"cairn {command} imports {heavy}"
"""


def test_commands_that_look_load_nothing_that_takes_seconds(store: str) -> None:
    write_iteration(unfinished := new_run(store, "unfinished"), 0)
    write_iteration(unfinished, 1, until=Step.ADVANTAGE)
    runs = ("toy", "other", "unfinished")
    commands = ["runs", *(command for run in runs for command in (f"status {run}", f"show {run}@0", f"verify {run}"))]
    ran = subprocess.run([sys.executable, "-c", LOOKING, store, *commands], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(cairn("status", "unfinished", "--json", "--store", store).stdout)["step"] == "advantage"


def test_in_its_first_iteration_the_loss_knows_what_comes_next(store: str) -> None:
    write_iteration(new_run(store, "waiting"), 0, until=Step.ADVANTAGE)
    assert json.loads(cairn("status", "waiting", "--json", "--store", store).stdout)["step"] == "advantage"
