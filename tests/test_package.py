"""The package that is built: all of the five folders, below one import root."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePath

import pytest
import yaml

from tests.tiny_run import tiny_config

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "engines", "flows", "storage", "tasks")
SGLANG = PurePath("engines/rollout/sglang")
ON_ITS_PATH = (SGLANG / "cpu", SGLANG / "plugin")
"""Put before the path of SGLang's own Python: files, no packages of ours."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files() -> set[PurePath]:
    """Of the package, relative to the project."""
    return {
        file.relative_to(ROOT)
        for room in ("cairn", *ROOMS)
        for file in (ROOT / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_every_folder_with_code_is_a_package_that_the_project_names() -> None:
    own = {file for file in files() if not any(file.is_relative_to(folder) for folder in ON_ITS_PATH)}
    folders = {file.parent for file in own if file.suffix == ".py"}
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(named) == sorted(
        ".".join(("cairn", *folder.parts)).replace("cairn.cairn", "cairn") for folder in folders
    )
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


@pytest.mark.parametrize("room", ROOMS)
def test_lint_refuses_the_bare_name_of_a_folder(room: str) -> None:
    bare = f"import {room}\nimport {room}.some\nfrom {room} import some\nfrom {room}.some import thing\n"
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise", "-"]
    output = subprocess.run(
        ruff, input=bare + f"import cairn.{room}\n", cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert [line.split(":")[1] for line in output.splitlines() if "TID251" in line] == ["1", "2", "3", "4"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, from a copy: setuptools leaves what it made beside what it read."""
    source = tmp_path_factory.mktemp("source")
    for file in [*files(), PurePath("pyproject.toml"), PurePath("README.md"), PurePath("LICENSE")]:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    run(*pip, "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "wheels", ".", cwd=source)
    (built,) = (source / "wheels").glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_folders(wheel: Path) -> None:
    names = map(PurePath, zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if not name.parts[0].endswith(".dist-info")}
    wanted = {file if file.parts[0] == "cairn" else "cairn" / file for file in files()}
    assert packed == wanted
    assert PurePath("cairn/engines/rollout/sglang/requirements.txt") in packed
    assert PurePath("cairn/configs/recipes/quickstart.yaml") in packed
    assert all(any(file.is_relative_to("cairn" / folder) for file in packed) for folder in ON_ITS_PATH)


@pytest.mark.slow
def test_a_wheel_installed_elsewhere_runs_cairn(wheel: Path, tmp_path: Path, tiny_assets: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    run(*pip, "--no-deps", "--no-index", "--quiet", "--target", "installed", wheel, cwd=tmp_path)
    installed = tmp_path / "installed"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_config(tiny_assets).model_dump(mode="json")))
    path = f"{installed}:{tiny_assets}"
    where = run(sys.executable, "-c", "import cairn.flows.cli as it; print(it.__file__)", cwd=tmp_path, PYTHONPATH=path)
    assert Path(where.strip()).is_relative_to(installed)
    assert "resume" in run(installed / "bin" / "cairn", "--help", cwd=tmp_path, PYTHONPATH=path)
    assert "num_rollout: 3" in run(
        installed / "bin" / "cairn", "validate", "recipe.yaml", cwd=tmp_path, PYTHONPATH=path
    )
