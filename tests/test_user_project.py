"""A project that has packages `flows`, `tasks`, `engines`, `storage` and `configs` of its own, as Prefect's users have:
its plug-ins import them wherever they run, and ours stay ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny_run import tiny_config

CAIRN = Path(sys.executable).with_name("cairn")
NAMES = ("flows", "tasks", "engines", "storage", "configs")

PLUG_INS = '''
"""Note in which process which packages were found; what is not the project's ends the run."""

import json
import os
from pathlib import Path

import configs.own
import engines.own
import flows.own
import storage.own
import tasks.own

OWN = (configs.own, engines.own, flows.own, storage.own, tasks.own)


def found():
    import cairn.configs, cairn.engines, cairn.flows, cairn.storage, cairn.tasks

    assert [module.WHOSE for module in OWN] == ["the project's"] * 5
    assert not hasattr(cairn.tasks, "own")
    return {"pid": os.getpid(), "from": sorted({Path(module.__file__).parts[-3] for module in OWN})}


def note(where, what):
    with open("noted.jsonl", "a") as file:
        file.write(json.dumps({"where": where, **what}) + "\\n")


def grade(response, label, metadata):
    note("grader", found())
    return sum(ord(char) % 3 for char in response) / (3 * len(response) + 1)


def keep(rewards):
    import ray

    note("driver", found())
    note("worker", ray.get(ray.remote(num_cpus=0)(found).remote()))
    return True
'''


@pytest.fixture
def project(tmp_path: Path, tiny_assets: Path) -> Path:
    """Its folder, with a recipe of one iteration."""
    folder = tmp_path / "project"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / "own.py").write_text('WHOSE = "the project\'s"\n')
    (folder / "plug_ins.py").write_text(PLUG_INS)
    config = tiny_config(
        tiny_assets,
        rollout={
            "num_rollout": 1,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "dynamic_sampling_filter": "plug_ins.keep",
        },
        reward={"custom_rm_path": "plug_ins.grade"},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return folder


@pytest.mark.slow
def test_plug_ins_find_the_packages_of_their_project_in_driver_graders_and_ray_workers(
    project: Path, api_url: str
) -> None:
    done = subprocess.run(
        [CAIRN, "train", "recipe.yaml"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": ".", "PREFECT_API_URL": api_url},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    noted = [json.loads(line) for line in (project / "noted.jsonl").read_text().splitlines()]
    assert all(note["from"] == ["project"] for note in noted)
    processes = {
        where: {note["pid"] for note in noted if note["where"] == where} for where in ("driver", "grader", "worker")
    }
    assert all(processes.values())
    assert len(set.union(*processes.values())) == sum(map(len, processes.values()))
