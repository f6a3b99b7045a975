"""How the process of a command ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.cli.test_reading import CAIRN

READING = """
import sys, threading
import numpy as np
import pyarrow as pa
from cairn.flows.cli import main
from cairn.storage.ledger.snapshots import from_parquet, to_parquet

data = to_parquet(pa.table({str(column): np.random.rand(1000) for column in range(16)}))

def read():
    while True:
        from_parquet(bytes(bytearray(data)))

for _ in range(8):
    threading.Thread(target=read, daemon=True).start()
main()
"""
"""A command during which other threads read tables: those of Arrow free the bytes, for which they need the
interpreter."""

ENDING = """
import threading
from cairn.flows.cli import main

class Late:
    def __del__(self):
        print("the interpreter was taken down")

late = Late()

def last():
    threading.main_thread().join()
    print("joined")

threading.Thread(target=last).start()
main()
"""


def test_threads_that_still_free_what_they_read_do_not_abort_a_command_at_its_end() -> None:
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", READING, "--version"], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("cairn ")


@pytest.mark.parametrize(("words", "code"), [(["runs"], 0), (["no-such-command"], 2)])
def test_a_command_ends_in_order_with_its_code_and_all_that_it_printed(
    words: list[str], code: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("joined\n")


def test_a_command_without_an_open_output_ends_in_order() -> None:
    done = subprocess.run(f'"{CAIRN}" runs >&-', shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def test_an_interrupt_that_no_command_handles_ends_with_its_code() -> None:
    script = """
import cairn.flows.cli, sys

def interrupted():
    raise KeyboardInterrupt

sys.modules["cairn.flows.cli.app"].app = interrupted
cairn.flows.cli.main()
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 130


def test_output_that_cannot_be_written_is_no_success() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([CAIRN, "--version"], stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60)
    assert done.returncode != 0
