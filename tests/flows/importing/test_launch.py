"""What a launch script can do while it is imported: nothing to this machine."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cairn.configs.errors import BadInput
from cairn.flows.importing.launch import launch_of

TRAIN = "\npython3 train.py --lr 1\n"


def launched(folder: Path, text: str) -> tuple[str, ...]:
    script = folder / "run.sh"
    script.write_text(text)
    return launch_of(script, {}).arguments


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
