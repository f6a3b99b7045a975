"""Programs against hidden tests, in real sandboxes: what is right is paid, and what is hostile gets nowhere."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.processes.sandbox import Sandbox
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.grading.outside.code import confined
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample

Grade = Callable[..., Graded]


@pytest.fixture
def grade(bwrap: str) -> Grade:
    def one(program: str, tests: Any, **options: Any) -> Graded:
        names = {"fn_name": options.pop("fn_name")} if "fn_name" in options else {}
        config = RewardConfig.model_validate(
            {"rm_type": "code", "code": {"bwrap": bwrap, "test_timeout": 5, **options}}
        )
        grader = open_grader(config)
        try:
            return grader.grade([Sample(program, None, {"tests": tests, **names})])[0]
        finally:
            grader.close()

    return one


ADDS = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "11\n\n"}]


def test_a_program_that_prints_what_is_wanted_passes(grade):
    assert grade(ADDS, SUMS) == Graded(1.0, {"passed": 2, "tests": 2})
    assert grade(ADDS, json.dumps({"inputs": ["1 2"], "outputs": ["3"]})).reward == 1.0
    assert grade("print(3)", [{"input": "", "output": "3"}]).reward == 1.0  # all of the answer, without a fence


def test_the_first_test_that_fails_is_told_and_part_of_them_may_count(grade):
    tests = [{"input": "1 2", "output": "3"}, {"input": "1 2", "output": "4"}, {"input": "x", "output": "4"}]
    found = grade(ADDS, tests)
    assert found == Graded(0.0, {"passed": 1, "tests": 3, "failed_test": 1, "failed_why": "wrong output"})
    found = grade(ADDS, [tests[2], tests[0]], partial_credit=True)
    assert found.reward == 0.5
    assert "ValueError" in found.components["failed_why"]


def test_a_function_is_called_with_its_arguments(grade):
    tests = [{"input": "[1, 2]\n3", "output": "[1, 2, 3]"}, {"input": [["a"], "b"], "output": ["a", "b"]}]
    plain = "def f(xs, x):\n    print('noise')\n    return xs + [x]"
    assert grade(plain, tests, fn_name="f").reward == 1.0
    method = "class Solution:\n    def f(self, xs, x):\n        return xs + [x]"
    assert grade(method, tests, fn_name="f").reward == 1.0
    assert grade("def f(xs, x):\n    return xs", tests, fn_name="f").components["failed_why"] == "wrong value"
    assert grade("def f(xs, x):\n    raise SystemExit(0)", tests, fn_name="f").reward == 0.0


def test_a_value_may_be_wrapped_in_a_list_as_in_apps(grade):
    tests = {"fn_name": "f", "inputs": [[[1, 2]], [[]]], "outputs": [[3], [0]]}
    assert grade("def f(xs):\n    return sum(xs)", tests).reward == 1.0
    assert grade("def f(xs):\n    return [sum(xs)]", json.dumps(tests)).reward == 1.0
    first_of_several = {"fn_name": "f", "inputs": [[2]], "outputs": [[2, 3]]}
    assert grade("def f(x):\n    return x", first_of_several).components["failed_why"] == "wrong value"
    assert grade("def f(x):\n    return [x, 3]", first_of_several).reward == 1.0


def test_assertions_hold_behind_the_program(grade):
    tests = [{"assert": "f(2) == 4"}, "assert f(3) == 9, 'no'"]
    assert grade("def f(x):\n    return x * x", tests).reward == 1.0
    assert grade("def f(x):\n    return 4", tests).components["failed_test"] == 1
    assert grade("import sys\nsys.exit(0)", tests).reward == 0.0


@pytest.mark.parametrize("tests", [None, [], "x", [1], [{"input": "1"}], {"inputs": ["1"], "outputs": []}])
def test_a_row_without_tests_fails_its_sample(grade, tests):
    found = grade(ADDS, tests)
    assert found.reward is None
    assert "tests" in str(found.error)


FORKS = """
import os, time
n = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    pass
print(n < 64)
"""
HOG = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = b"x" * 2**26
        time.sleep(60)
print(os.wait()[1] & 127 == 9)
"""

HOSTILE = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "unix sockets": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('{socket}')",
    "the host's files": "print(open('{secret}').read())",
    "the host's accounts": "print(open('/etc/passwd').read())",
    "the environment": "import os\nassert 'CAIRN_SECRET' in os.environ",
    "its parent's environment": "print(open('/proc/1/environ').read().index('CAIRN_SECRET'))",
    "write the interpreter": "import os\nopen(os.__file__, 'a').write('#')",
    "write the root": "open('/x', 'w')",
    "write much": "open('x', 'wb').write(bytes(2**26))",
    "write many files": "for i in range(100):\n    open(str(i), 'wb').write(bytes(2**20))",
    "memory": "x = bytearray(2**31)",
    "another namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/scratch', b'tmpfs', 0, None) == 0",
    "become root": "import os\nos.setuid(0)",
    "processes of others": "import os\nassert [p for p in os.listdir('/proc') if p.isdigit() and int(p) == {pid}]",
    "die by a signal": "import ctypes\nctypes.string_at(0)",
}


OPEN_TO_ALL = ("network", "unix sockets", "the host's files", "the host's accounts", "the environment", "write much")


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.proof
def test_a_hostile_program_gets_nothing(grade, what, tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("CAIRN_SECRET", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "s"))
        local.listen()
        program = HOSTILE[what].format(
            port=server.getsockname()[1], socket=tmp_path / "s", secret=tmp_path / "secret", pid=os.getpid()
        )
        if what in OPEN_TO_ALL:  # so it is the sandbox that holds it
            subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=tmp_path, check=True)
        found = grade(program, [{"input": "", "output": ""}])
    assert found.components["failed_why"].startswith("exit code"), found


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nwhile True: time.sleep(60)",
    ],
)
@pytest.mark.proof
def test_a_program_without_an_end_is_ended(grade, program):
    found = grade(program, [{"input": "", "output": ""}], test_timeout=0.3)
    assert found.components["failed_why"] == "it took too long"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.proof
def test_a_program_that_prints_without_an_end_is_ended(grade, stream):
    program = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
    found = grade(program, [{"input": "", "output": ""}], file_size=2**16, test_timeout=60)
    assert found.components["failed_why"] == "it printed too much"


@pytest.mark.proof
def test_a_fork_bomb_goes_with_all_of_its_processes(grade):
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    most = 0
    done = threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, len({child.pid for child in me.children(recursive=True)} - before))

    watching = threading.Thread(target=count)
    watching.start()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    found = grade(bomb, [{"input": "", "output": ""}], test_timeout=1, processes=16)
    done.set()
    watching.join()
    assert found.reward == 0.0
    assert {child.pid for child in me.children(recursive=True)} <= before
    assert most > 2


@pytest.mark.proof
def test_processes_of_a_program_are_counted_where_that_can_be(bwrap, grade):
    config = RewardConfig.model_validate({"rm_type": "code", "code": {"bwrap": bwrap}}).code
    if not Sandbox(confined(config)).bounds_all:
        pytest.skip("this machine lets us make no cgroup")
    assert grade(FORKS, [{"input": "", "output": "True"}], processes=32).reward == 1.0
    assert grade(HOG, [{"input": "", "output": "True"}], memory=2**27).reward == 1.0


def test_without_a_sandbox_nothing_runs(tmp_path):
    def config(program: Path) -> RewardConfig:
        return RewardConfig.model_validate({"rm_type": "code", "code": {"bwrap": str(program)}})

    with pytest.raises(BadPlugin, match=r"install bubblewrap, or set reward\.code\.bwrap"):
        get_grader(config(tmp_path / "nowhere"))
    refuses = tmp_path / "bwrap"
    refuses.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refuses.chmod(0o755)
    with pytest.raises(BadPlugin, match=r"No permissions to create new namespace.*allow user namespaces"):
        get_grader(config(refuses))
