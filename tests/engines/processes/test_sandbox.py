"""What programs of a policy cannot do, whoever runs them: one program tries it all (`escapes.py`), in one sandbox."""

import asyncio
import ctypes
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.engines.processes.bubblewrap import Confined
from cairn.engines.processes.sandbox import Sandbox, SandboxFailed

ESCAPES = Path(__file__).with_name("escapes.py")
PLAIN = 54321
"""A user of no rights."""
FILE_SIZE = 2**20


def confined(bwrap: str, **options: Any) -> Confined:
    inputs = {"seconds": 20.0, "cpu_time": 20, "memory": 2**28, "processes": 24, "file_size": FILE_SIZE}
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else None  # a plain user sees none of root's
    return Confined("the test", "test.bwrap", bwrap, python, **{**inputs, **options})


@pytest.fixture(params=["root", "plain"])
def as_user(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function in a process of this user; returns what it returns, a JSON value."""

    def call(function: Callable[[], Any]) -> Any:
        if request.param == "root" and os.geteuid():
            pytest.skip("these tests do not run as root")
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.close(read)
                os.setsid()
                if request.param == "plain" and not os.geteuid():
                    os.setgroups([])
                    os.setresgid(PLAIN, PLAIN, PLAIN)
                    os.setresuid(PLAIN, PLAIN, PLAIN)
                with os.fdopen(write, "w") as pipe:
                    json.dump(function(), pipe)
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        return json.loads(said)

    return call


@pytest.fixture
def abstract() -> Iterator[str]:
    name = f"cairn-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        yield name


def hold_a_key(name: str) -> None:
    """In a session keyring of this process's own."""
    libc = ctypes.CDLL(None)
    add, control = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
    libc.syscall(control, 1, None)
    libc.syscall(add, b"user", name.encode(), b"secret", 6, -3)


def users_inside() -> set[int]:
    """Users of the processes below this one that are in a namespace of processes of their own."""
    result = set[int]()
    for process in psutil.Process().children(recursive=True):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if len(fields["NSpid"].split()) > 1:
            result |= {int(uid) for uid in fields["Uid"].split()}
    return result


def test_no_program_gets_out(bwrap, as_user, abstract, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        inputs = {
            "pid": os.getpid(),
            "port": server.getsockname()[1],
            "abstract": abstract,
            "key": "cairn-test",
            "files": [str(tmp_path), str(Path.cwd())],
            "processes": 24 + 4,
            "file_size": FILE_SIZE,
        }

        def escape() -> Any:
            hold_a_key("cairn-test")
            os.environ["CAIRN_SECRET"] = "swordfish"
            sandbox, over, users = Sandbox(confined(bwrap)), threading.Event(), set[int]()

            def look() -> None:
                while not over.wait(0.02):
                    users.update(users_inside())

            looking = threading.Thread(target=look)
            looking.start()
            ran = asyncio.run(sandbox.run(ESCAPES.read_bytes(), json.dumps(inputs).encode()))
            over.set()
            looking.join()
            return ran.code, ran.output.decode(), ran.errors.decode(), sorted(users)

        code, output, errors, users = as_user(escape)
    assert code == 0, errors
    result, tried = output.splitlines()
    assert json.loads(result) == {}
    assert tried == "30 tries"
    assert users
    assert 0 not in users


def test_a_program_has_what_it_needs(bwrap, as_user):
    program = b"""
import multiprocessing, os, random, tempfile, threading
multiprocessing.set_start_method("fork")
with tempfile.TemporaryFile(dir="/scratch") as file: file.write(b"x")
lock, value = multiprocessing.Lock(), multiprocessing.Value("i", 0)
worker = multiprocessing.Process(target=lambda: value.__setattr__("value", 7)); worker.start(); worker.join()
print(value.value, len(os.urandom(4)), open("/dev/null").read() == "", sorted(os.listdir("/scratch")), flush=True)
print("printed", file=open("/dev/stdout", "w"))
"""

    def run() -> Any:
        ran = asyncio.run(Sandbox(confined(bwrap)).run(program, b""))
        return ran.code, ran.output.decode(), ran.errors.decode()

    assert as_user(run) == [0, "7 4 True ['program.py']\nprinted\n", ""]


HOG = b"""
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(b"x") * 2**26
        time.sleep(20)
os.abort() if os.wait()[1] & 127 == 9 else None
"""


def test_a_program_that_takes_the_memory_is_told_from_a_machine_that_fails(bwrap, as_user):
    def run() -> Any:
        sandbox = Sandbox(confined(bwrap, memory=2**27, seconds=8.0))
        ran = asyncio.run(sandbox.run(HOG, b""))
        return ran.out_of_memory, f"{ran.code} {ran.late} {ran.errors.decode()}"

    out_of_memory, how = as_user(run)
    assert out_of_memory, how


def test_a_program_whose_sandbox_never_lasts_is_told_from_a_machine_that_fails(bwrap, tmp_path_factory):
    fails = tmp_path_factory.mktemp("fails") / "bwrap"
    fails.write_text(f'#!/bin/sh\ncase "$*" in *evil*) kill -9 $$;; esac\nexec "{bwrap}" "$@"\n')
    fails.chmod(0o755)
    sandbox = Sandbox(confined(str(fails)))
    assert asyncio.run(sandbox.execute(["/bin/echo", "evil"], b"")).lost
    assert asyncio.run(sandbox.execute(["/bin/echo", "good"], b"")).output == b"good\n"
    fails.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(SandboxFailed, match="did not start"):
        asyncio.run(sandbox.execute(["/bin/echo", "good"], b""))
