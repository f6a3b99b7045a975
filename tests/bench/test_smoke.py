"""Every benchmark works: each is run once, short, as its command line runs it.

What it measures means nothing then. The cheap ones run in this process, those that start servers, clusters or ranks in
one of their own.
"""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.trl_process import ENVIRONMENT

BENCH = Path(__file__).parents[2] / "bench"
ON_THE_QUICKSTART = (
    "seeds",
    "learning",
    "durability",
    "cpu",
    "round_trips",
    "pipeline",
    "start",
    "recovery",
    "trl",
    "board",
)
"""Benchmarks of a recipe's model and data."""

ON_A_BUCKET = ("ledger", "write_ahead")
CHEAP = ("pipeline_sim", "snapshots", "rollout", "training", "write_ahead", "invariance")
DEAR = ("ledger", "seeds", "episodes", "versions")
"""Benchmarks that run in this process too, and start others or write much."""

LONG = (
    "sql",
    "report",
    "board",
    "rescore",
    "learning",
    "orchestration",
    "sync",
    "sglang",
    "megatron",
    "logits",
    "durability",
    "cpu",
    "round_trips",
    "scale",
    "scale_rollout",
    "pipeline",
    "start",
    "recovery",
    "checkpoint",
    "trl",
)


ELSEWHERE = ("driver_load",)
"""Benchmarks whose run is a test of what they find: test_scale.py."""


def arguments(name: str, assets: Path, results: Path) -> list[str]:
    given = ["--smoke", "--json", str(results)]
    if name in ON_THE_QUICKSTART:
        options = {
            "model.path": assets / "model",
            "data.path": assets / "train.jsonl",
            "data.apply_chat_template": "false",
            "data.label_key": "label",
            "reward": f"{{custom_rm_path: '{assets / 'grader.py'}:grade'}}",
        }
        if name == "board":  # it trains the recipe as it is
            options |= {"eval.benchmarks": "[]", "eval.eval_interval": "null"}
        for option, value in options.items():
            given += ["--set", f"{option}={value}"]
    return given


def test_every_benchmark_is_run_by_make_bench_and_here() -> None:
    runnable = {path.stem for path in BENCH.glob("*.py") if "\ndef main()" in path.read_text()}
    parts = {"__main__", "trl_worker", "scale_driver", "gpu"}  # tests/gpu/test_bare_machine.py runs the last
    assert {shlex.split(command)[0] for command in BENCHMARKS.values()} == {
        f"bench.{name}" for name in runnable - parts
    }
    assert sorted(BENCHMARKS) == sorted([*CHEAP, *DEAR, *LONG, *ELSEWHERE])


@pytest.mark.parametrize("name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.slow) for name in DEAR)])
def test_a_cheap_benchmark_works(
    name: str,
    tiny_assets: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = shlex.split(BENCHMARKS[name])[0]
    store = ["--store", request.getfixturevalue("s3_url")] if name in ON_A_BUCKET else []
    monkeypatch.setattr(sys, "argv", [module, *arguments(name, tiny_assets, tmp_path / "found.json"), *store])
    importlib.import_module(module).main()
    assert json.loads((tmp_path / "found.json").read_text())
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_a_long_benchmark_works(name: str, tiny_assets: Path, tmp_path: Path, api_url: str) -> None:
    if name == "trl" and not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"needs {ENVIRONMENT.name}, which `python -m bench.trl --smoke` makes on first use")
    module = shlex.split(BENCHMARKS[name])[0]
    results = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments(name, tiny_assets, results)],
        capture_output=True,
        text=True,
        timeout=840,
        cwd=BENCH.parent,
        env=os.environ | {"PREFECT_API_URL": api_url},  # those that time a server start it all the same
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(results.read_text())
    assert " s  " in done.stderr, "it says how far it is"
