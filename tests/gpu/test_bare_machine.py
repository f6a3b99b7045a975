"""What `one_gpu.sh` needs of a machine: an interpreter with the packages that it names, and the wheels that it carries.

The script runs here on a CPU, with tiny models, in an environment of these packages alone: without Ray, Prefect and
everything else that Cairn depends on. The tests of a GPU are collected and skipped there.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from bench.gpu import SECTIONS

SCRIPT = Path(__file__).with_name("one_gpu.sh")
THERE = ("torch", "transformers", "peft", "pyarrow", "pillow", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
"""Packages that the script names as the machine's own."""


def carried() -> list[str]:
    found = re.search(r'^CARRIED="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def with_requirements(packages: list[str]) -> dict[str, Path]:
    """Top-level entries of packages, and of those that they require, in this environment."""
    seen: set[str] = set()
    entries: dict[str, Path] = {}
    waiting = [*packages]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        for file in found.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                entries[file.parts[0]] = Path(str(found.locate_file(file.parts[0])))
        needs = [need for need in found.requires or () if "extra ==" not in need]
        waiting += [re.split(r"[^\w.-]", need)[0] for need in needs]
    return entries


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has these packages alone."""
    root = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    for name, path in with_requirements([*THERE, *carried()]).items():
        (site / name).symlink_to(path)
    return root / "bin" / "python"


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_the_script_runs_where_neither_ray_nor_prefect_is_installed(python: Path, tmp_path: Path) -> None:
    assert subprocess.run([python, "-c", "import ray"], capture_output=True).returncode != 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    settings = {
        "PYTHON": str(python),
        "OUT": str(tmp_path),
        "WHEELS": str(tmp_path / "none"),
        "DEVICE": "cpu",
        "LIMIT": "1700",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([SCRIPT], env=environment | settings, capture_output=True, text=True, timeout=1750)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    findings = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert {found["section"] for found in findings} == {"machine", *SECTIONS}
    assert not [found for found in findings if "failed" in found]
    assert findings[0]["there"]["prefect"] is False
    assert re.search(r"\d+ skipped", (tmp_path / "log").read_text())


def test_the_script_names_what_it_expects_and_carries_pinned_versions() -> None:
    head = " ".join(SCRIPT.read_text().split("set -u")[0].replace("#", " ").split())
    assert [package for package in THERE if package not in head] == []
    pinned = {line.partition("==")[0] for line in (SCRIPT.parents[2] / "constraints.txt").read_text().splitlines()}
    assert [package for package in carried() if package not in pinned] == []
