"""`cairn train | resume | up` as a person starts them: real processes with engines, Ray and Prefect."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.flows.driver.sources import input_digests
from cairn.flows.iteration import collect, iteration
from cairn.flows.text import plain
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.data.prompts import PromptData
from tests.background import in_background
from tests.commands import cairn
from tests.tiny_run import PROMPTS, DirectSteps, tiny_config, tiny_context

CAIRN = Path(sys.executable).with_name("cairn")
DEADLINE = 600

pytestmark = pytest.mark.timeout(4 * DEADLINE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of this module are given: they share Prefect's database, which takes long to create."""
    monkeypatch.chdir(home)
    return home


def write_recipe(folder: Path, name: str, assets: Path, **sections: dict[str, Any]) -> None:
    config = tiny_config(assets, **sections)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CAIRN, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE
    )


def asked(api_url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """What Prefect's API answers."""
    found: list[dict[str, Any]] = httpx.post(f"{api_url}{path}", json=body, timeout=60).raise_for_status().json()
    return found


def status(name: str) -> dict[str, Any]:
    return json.loads(cairn("status", name, "--json").stdout)


@pytest.fixture(scope="module")
def trained(tiny_assets: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """What `cairn train` said of a whole run, origin, in which an iteration is collected while another is learned."""
    write_recipe(home, "origin", tiny_assets, rollout={"num_rollout": 4, "pipeline": "lagged"})
    return run("train", "origin.yaml", cwd=home)


@pytest.mark.usefixtures("folder")
def test_a_run_trains_to_its_end_with_an_engine_a_trainer_and_a_prefect_server_of_its_own(
    trained: subprocess.CompletedProcess[str],
) -> None:
    assert trained.returncode == 0, trained.stderr
    assert "[4/4] iteration 3  reward " in trained.stdout
    done = status("origin")
    assert (done["state"], done["iterations"], done["weight_version"]) == ("completed", 4, 4)
    assert done["state_digest"] in trained.stdout
    assert json.loads(cairn("verify", "origin", "--json").stdout)["findings"] == []


@pytest.mark.slow
def test_a_run_that_was_interrupted_or_failed_says_how_to_go_on_and_does(
    tiny_assets: Path, folder: Path, api_url: str
) -> None:
    grader = folder / "grader.py"
    grader.write_text((tiny_assets / "grader.py").read_text())
    (folder / "own_loss.py").write_text("from cairn.engines.training.losses.policy_loss import loss\n")
    benchmark = {"name": "heldout", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4}
    write_recipe(
        folder, "short", tiny_assets, rollout={"num_rollout": 6, "max_refill_rounds": 1},
        reward={"custom_rm_path": "grader.py:grade"}, algorithm={"loss_type": "own_loss.py:loss"},
        tracking={"tensorboard_dir": "board"},
        checkpoint={"save_interval": 1, "save_retain_interval": 3, "retain_snapshots": 2},
        eval={"eval_interval": 6, "benchmarks": [benchmark], "skip_eval_before_train": True},
    )  # fmt: skip
    with in_background(CAIRN, "train", "short.yaml") as process:
        for line in process.stdout:
            if line.startswith("[1/6] iteration 0  reward "):
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, errors
    message = r"interrupted; nothing committed is lost\. Continue with: (PYTHONPATH=\S+ )?cairn resume short\n$"
    assert re.search(message, errors)
    interrupted = status("short")
    assert (interrupted["state"], 1 <= interrupted["iterations"] < 6) == ("interrupted", True)

    sound = grader.read_text()
    grader.write_text("def grade(response, label, metadata):\n    raise RuntimeError('no grade')\n")
    failing = run("train", "short.yaml", "--run", "failing", PREFECT_API_URL=api_url)
    assert failing.returncode == 1
    assert "commonest error  RuntimeError: no grade at grader.py:2, 16 of 16 samples\n" in failing.stderr
    assert "cairn train short.yaml --run failing-2\n" in failing.stderr
    assert "Traceback" not in failing.stderr
    assert status("failing")["state"] == "failed"
    (flow_run,) = asked(api_url, "/flow_runs/filter", flow_runs={"name": {"any_": ["failing"]}})
    said = flow_run["state"]["message"].splitlines()
    assert said[0] == "iteration 0: 16 of 16 samples failed: RuntimeError: no grade at grader.py:2"
    assert said[-1].endswith("cairn train short.yaml --run failing-2")
    (artifact,) = asked(api_url, "/artifacts/filter", artifacts={"key": {"any_": ["failure-failing"]}})
    assert artifact["flow_run_id"] == flow_run["id"]
    assert artifact["description"] == plain(said[0])
    logged = asked(api_url, "/logs/filter", logs={"flow_run_id": {"any_": [flow_run["id"]]}})
    assert not [record for record in logged if "Traceback" in record["message"]]

    grader.write_text(sound)
    resumed = run("resume", "short")
    assert resumed.returncode == 0, resumed.stderr
    assert "run short: continuing at iteration" in resumed.stdout
    assert "[6/6] iteration 5  reward " in resumed.stdout
    assert re.search(r"^heldout: 0\.\d+ → 0\.\d+$", resumed.stdout, re.MULTILINE)
    assert "INFO" not in resumed.stderr, "Prefect's log of states stays off the terminal"
    done = status("short")
    assert (done["state"], done["iterations"], done["weight_version"]) == ("completed", 6, 6)
    assert done["state_digest"] in resumed.stdout
    assert list((folder / "board" / "short").glob("events.*"))

    verified = json.loads(cairn("verify", "short", "--json").stdout)
    assert (verified["findings"], verified["retired"] > 0) == ([], True), "the driver removed older files"
    assert json.loads(cairn("gc", "short", "--json").stdout)["retention"] == [], "all that it could"

    continued = cairn("train", "short.yaml")
    assert (continued.exit_code, continued.stderr) == (0, "run short has all its iterations; nothing is left to do\n")


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["demonstrations", "preferences"])
def test_a_run_that_learns_from_its_data_goes_on_where_it_was_interrupted(
    learns: str, tiny_assets: Path, folder: Path, api_url: str
) -> None:
    rows = [{"prompt": prompt, "response": "7 7", "chosen": "7 7", "rejected": "1 2 3"} for prompt in PROMPTS]
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = learns == "demonstrations"
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_assets / "model")},
            "data": {"path": "responses.jsonl"} | ({"response_key": "response"} if values else {}),
            "rollout": {"num_rollout": 3, "rollout_batch_size": 4},
            "algorithm": {"loss_type": "sft_loss"} if values else {"advantage_estimator": "dpo"},
            "training": {"lr": 1e-4, "num_threads": 1},
            "checkpoint": {"save_interval": 2},
            "tracking": {"tensorboard_dir": None},
        }
    )
    with tiny_context(str(folder), config, learns) as (driver, _):
        iteration(driver, DirectSteps(driver), 0)
        collect(driver, DirectSteps(driver), 1)
    assert (status(learns)["state"], status(learns)["iterations"]) == ("interrupted", 1)
    resumed = run("resume", learns, PREFECT_API_URL=api_url)
    assert resumed.returncode == 0, resumed.stderr
    assert f"run {learns}: continuing at iteration 1 of 3" in resumed.stdout
    assert [index for index in range(3) if f"\n[{index + 1}/3] iteration {index}  " in resumed.stdout] == [1, 2]
    assert (status(learns)["state"], status(learns)["weight_version"]) == ("completed", 3)
    assert cairn("verify", learns).exit_code == 0


@pytest.mark.slow
def test_a_fork_trains_otherwise_from_weights_that_only_replay_can_bring_back(
    trained: subprocess.CompletedProcess[str], folder: Path, api_url: str
) -> None:
    assert trained.returncode == 0, trained.stderr
    made = cairn("fork", "origin@1", "faster", "--set", "training.lr=0.002")
    assert made.stdout == (
        "run faster shares iterations 0 to 1 with origin and computes 2 to 3 itself\n"
        "  training.lr: 0.001 → 0.002\n"
        "continue with: cairn resume faster\n"
    )
    assert status("faster")["state"] == "new"
    resumed = run("resume", "faster", PREFECT_API_URL=api_url)
    assert resumed.returncode == 0, resumed.stderr
    assert "Restoring the weights of iteration 1 as run origin trained them" in resumed.stdout + resumed.stderr
    assert status("faster")["state"] == "completed"
    saved = Ledger.open(open_store(str(folder)), "faster").find(0, Step.CHECKPOINT)
    assert saved is not None, "of what iteration 2 samples from"
    assert saved.run == "faster"
    assert cairn("verify", "faster").exit_code == 0

    compared = cairn("diff", "origin", "faster", "--json")
    assert compared.exit_code == 1
    parting = json.loads(compared.stdout)
    assert (parting["parts_at"], parting["options"]) == ("000002/train", [["training.lr", 0.001, 0.002]])

    continued = run("replay", "faster@2", "train")
    assert (continued.returncode, continued.stdout) == (0, "000002/train: equal, bit for bit\n")
    assert cairn("replay", "faster@7", "train").exit_code == 2
    assert cairn("replay", "faster@2", "training").exit_code == 2


@pytest.mark.proof
def test_a_second_driver_is_refused_with_the_name_of_the_first(tiny_assets: Path, folder: Path) -> None:
    config = tiny_config(tiny_assets)
    tokenizer = load_tokenizer(config.model.path)
    inputs = input_digests(config, PromptData.open(config.data, config.data.path, tokenizer), {})
    ledger = Ledger.create(open_store(str(folder)), "held", config.model_dump(mode="json"), inputs)
    ledger.acquire()
    second = run("resume", "held")
    assert second.returncode == 2, second.stderr
    assert f"run 'held' is driven by pid {os.getpid()} on " in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.slow
def test_up_serves_the_ui_of_the_folder_until_it_is_stopped(folder: Path) -> None:
    """By SIGTERM; that of tests/flows/deployments/test_interface.py ends by SIGINT."""
    with in_background(CAIRN, "up", "--port", "0") as process:
        url = next(match[1] for line in process.stderr if (match := re.search(r"UI is at (http://\S+);", line)))
        for page in ("/api/health", "/"):
            with urllib.request.urlopen(url + page, timeout=60) as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
