"""Code that a configuration names by its file."""

import os
import sys
from pathlib import Path

import pytest

from cairn.configs.plugins import _load_file, load_callable


def test_a_file_runs_as_it_is_now_though_it_was_changed_within_a_second_to_as_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "own.py"
    for number in (1, 2):
        file.write_text(f"def own():\n    return {number}\n")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        _load_file.cache_clear()  # as in another process
        assert load_callable(f"{file}:own")() == number
    assert list(tmp_path.iterdir()) == [file]
