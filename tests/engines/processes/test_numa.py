"""A process runs on the CPUs beside its device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.engines.processes.numa import address_of, bind, cpus_of

BOUND = """
import os, sys, threading
from pathlib import Path
from cairn.engines.processes.numa import bind

waiting, ended = threading.Event(), threading.Event()
affinity = []
def work():
    waiting.set(), ended.wait(), affinity.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=work)
thread.start(), waiting.wait()
bind("0000:3b:00.0", Path(sys.argv[1]))
ended.set(), thread.join()
print(sorted(os.sched_getaffinity(0)), affinity[0])
"""


def test_all_threads_of_a_process_are_bound_to_the_cpus_beside_a_device(tmp_path: Path) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    cpu = max(os.sched_getaffinity(0))
    (device / "local_cpulist").write_text(f"{cpu},4096-4099\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", BOUND, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == f"[{cpu}] [{cpu}]"


@pytest.mark.parametrize("cpus", ["4096-4099\n", "\n", None])
def test_nothing_is_bound_where_no_cpu_of_the_process_is_beside_it(tmp_path: Path, cpus: str | None) -> None:
    before = os.sched_getaffinity(0)
    (tmp_path / "gpu").mkdir()
    if cpus is not None:
        (tmp_path / "gpu" / "local_cpulist").write_text(cpus)
    assert not bind("gpu", tmp_path)
    assert os.sched_getaffinity(0) == before


def test_a_gpu_is_found_by_its_id(tmp_path: Path) -> None:
    for address, uuid in (("0000:3b:00.0", "aaaa-1"), ("0000:5e:00.0", "bbbb-2")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t GPU-{uuid}\n")
    assert address_of("bbbb-2", tmp_path) == "0000:5e:00.0"
    assert address_of("cccc-3", tmp_path) is None


def test_lists_of_cpus_are_read_as_linux_writes_them() -> None:
    assert cpus_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
