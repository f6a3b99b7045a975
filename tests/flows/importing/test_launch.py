"""What a launch script can do while it is imported: nothing to this machine."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cairn.configs.errors import BadInput
from cairn.flows.importing import launch
from cairn.flows.importing.launch import launch_of

TRAIN = "\npython3 train.py --lr 1\n"


def launched(folder: Path, text: str) -> tuple[str, ...]:
    return launch_of(_script(folder, text), {}).arguments


def _script(folder: Path, text: str) -> Path:
    script = folder / "run.sh"
    script.write_text(text)
    return script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.txt").write_text("secret")
    return inside


@pytest.mark.parametrize(
    "hostile",
    [
        "touch {folder}/made; echo x > {folder}/made; mkdir -p {folder}/made",
        "rm -rf {folder}/../outside.txt {folder}/run.sh",
        "/bin/sh -c 'touch {folder}/made'; command touch {folder}/made; exec touch {folder}/made",
        "python3 -c 'open(\"{folder}/made\", \"w\")'; $(touch {folder}/made); eval 'touch {folder}/made'",
        "kill -9 $PPID; kill -9 {pid}; builtin kill -9 {pid}",
        "exec 3<>/dev/tcp/127.0.0.1/9; curl http://127.0.0.1:9/x; trap 'touch {folder}/made' EXIT",
    ],
)
def test_a_script_changes_nothing(folder: Path, hostile: str) -> None:
    line = hostile.format(folder=folder, pid=os.getpid())
    with suppress(BadInput):  # where the script ends before it comes to its training
        assert launched(folder, line + TRAIN) == ("--lr", "1")
    assert sorted(file.name for file in folder.iterdir()) == ["run.sh"]
    assert (folder.parent / "outside.txt").read_text() == "secret"


def test_a_script_sees_no_environment_and_no_file_outside_of_its_checkout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    outside = folder.parent / "outside.txt"
    text = f'python3 train.py --a "$API_KEY" --b "$(cat {outside})" --c "$(< {outside})"'
    assert launched(folder, text) == ("--a", "", "--b", "", "--c", "")


@pytest.mark.parametrize("endless", ["while :; do :; done", "f() { f | f & f; }; f", "x=a; while :; do x=$x$x; done"])
def test_a_script_without_an_end_is_ended(folder: Path, endless: str) -> None:
    began = time.monotonic()
    with pytest.raises(BadInput, match="starts no training"):
        launched(folder, endless + TRAIN)
    assert time.monotonic() - began < 40


def test_no_link_leads_out_of_the_checkout_and_no_pipe_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SECONDS", 1)
    models = folder / "scripts/models"
    models.mkdir(parents=True)
    secret = folder.parent / "secret.sh"
    secret.write_text("A=secret")
    (models / "link.sh").symlink_to(secret)
    (models / "folder.sh").mkdir()
    (models / "bytes.sh").write_bytes(b"\xff\0")
    os.mkfifo(models / "pipe.sh")
    names = ("link.sh", "folder.sh", "bytes.sh", "pipe.sh", "..", "*", "[")
    gone = "; ".join(f"source '/gone/{name}'" for name in names)
    assert launched(folder, f'{gone}; source scripts/models/link.sh\npython3 train.py --a "$A"') == ("--a", "")
    with pytest.raises(BadInput, match="starts no training"):
        launched(folder, "source scripts/models/pipe.sh" + TRAIN)
    found = launch_of(_script(folder, TRAIN), {})
    assert found.read("scripts/models/pipe.sh") is found.read("scripts/models/folder.sh") is None


@pytest.mark.parametrize(
    "environment", ["[1]", '{"env_vars": [1]}', '{"env_vars": {"PYTHONPATH": null}}', '{"a":' * 5000, "{}"]
)
def test_the_environment_of_a_job_may_be_of_any_kind(folder: Path, environment: str) -> None:
    script = _script(folder, f"ray job submit --runtime-env-json='{environment}' -- {TRAIN.strip()}")
    assert launch_of(script, {}).arguments == ("--lr", "1")


def test_a_script_without_an_end_of_its_file_is_refused(folder: Path) -> None:
    (folder / "run.sh").symlink_to("/dev/zero")
    with pytest.raises(BadInput, match="longer than"):
        launch_of(folder / "run.sh", {})
