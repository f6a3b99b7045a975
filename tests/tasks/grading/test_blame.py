"""What fails a sample is what its grader does with it: nothing that happens to a process, a service or the machine."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.processes.child import Ended
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.tasks.grading import pool as pool_module
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.pool import FRESH_PROCESSES, KILLED, GraderPool
from cairn.tasks.grading.process import GraderProcess, OwnTime, _thread_states
from cairn.tasks.grading.worker import Terms
from cairn.tasks.rewards.grader import Graded, Takes
from cairn.tasks.rewards.sample import Sample
from tests.waiting import wait_for

GRADER = """
import errno, os, signal, sys, time
from cairn.tasks.rewards.grader import TryAgain

class Refused(Exception):
    def __init__(self, status):
        self.response = type("Response", (), {"status_code": status})()

def strikes(metadata):
    # Counts down over processes: a file a strike.
    for number in range(metadata.get("strikes", 0)):
        try:
            os.close(os.open(f"{metadata['folder']}/{number}", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            pass
    return False

def grade(response, label, metadata):
    if strikes(metadata):
        if response.startswith("signal"):
            os.kill(os.getpid(), int(response.split()[1]))
        if response.startswith("child"):
            if not (child := os.fork()):
                time.sleep(600)
            with open(f"{metadata['folder']}/children", "a") as children:
                print(child, file=children)
            os.kill(os.getpid(), int(response.split()[1]))
        if response == "no space":
            raise OSError(errno.ENOSPC, "No space left on device")
        if response == "no memory":
            raise MemoryError
        if response == "hang up":
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            time.sleep(600)
        if response == "sleep":
            time.sleep(600)
        if response == "compute":
            while True:
                pass
        if response == "connection":
            raise ConnectionResetError("by peer")
        if response == "group of connections":
            raise ExceptionGroup("tasks", [ConnectionResetError("by peer"), TimeoutError()])
        if response == "group with a mistake":
            raise ExceptionGroup("tasks", [ConnectionResetError("by peer"), KeyError("score")])
        if response == "no text":
            raise ValueError("half a pair: \\ud83d")
        if response == "try again":
            raise TryAgain("the judge rests")
        if response.startswith("status"):
            raise Refused(int(response.split()[1]))
    if response == "much memory":
        return float(len(bytearray(2**30)) > 0)
    return 0.5
"""


@pytest.fixture
def struck(tmp_path: Path) -> Iterator[Callable[..., Callable[..., Graded]]]:
    """Makes a pool, and of it a function that grades one sample which is struck so many times."""
    grader = tmp_path / "strikes.py"
    grader.write_text(GRADER)
    pools: list[GraderPool] = []

    def make(retries: GraderRetries | None = None, **options: Any) -> Callable[..., Graded]:
        config = RewardConfig(custom_rm_path=f"{grader}:grade", **{"rm_timeout": 60, **options})
        pools.append(GraderPool(config, retries or GraderRetries(retries=3, retry_delay_seconds=0.01)))

        def graded(response: str, strikes: int) -> Graded:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            struck = Sample(response, None, {"strikes": strikes, "folder": str(folder)})
            *healthy, one = pools[-1].grade([*[Sample("healthy", None)] * 3, struck])
            assert [g.reward for g in healthy] == [0.5] * 3
            return one

        return graded

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_WAIT", 0.01)


@pytest.mark.parametrize(
    "num_workers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.proof)]
)
def test_a_process_that_the_machine_kills_costs_its_sample_nothing(struck: Any, num_workers: int) -> None:
    grade = struck(num_workers=num_workers)
    for name in ("SIGKILL", "SIGTERM", "SIGBUS"):
        one = grade(f"signal {getattr(signal, name):d}", KILLED - 1)
        assert (one.reward, one.error, one.tries) == (0.5, None, KILLED), name
    with pytest.raises(GraderUnavailable, match=r"5 processes .* died with signal 9.*reward\.rm_memory"):
        grade(f"signal {signal.SIGKILL:d}", KILLED)


@pytest.mark.proof
def test_a_process_that_ends_takes_what_it_started_with_it_and_is_not_taken_for_one_that_sleeps(
    struck: Any, tmp_path: Path
) -> None:
    one = struck(rm_timeout=0.5)(f"child {signal.SIGKILL:d}", KILLED - 1)
    assert (one.reward, one.error, one.tries) == (0.5, None, KILLED)
    children = [int(pid) for file in tmp_path.glob("*/children") for pid in file.read_text().split()]
    assert len(children) == KILLED - 1
    wait_for(lambda: not any(map(_runs, children)))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("response", ["no space", "no memory"])
@pytest.mark.proof
def test_a_machine_with_nothing_left_costs_a_sample_nothing(struck: Any, response: str) -> None:
    grade = struck()
    assert grade(response, KILLED - 1).reward == 0.5
    with pytest.raises(GraderUnavailable, match=r"No space left|MemoryError"):
        grade(response, KILLED)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all data on Linux only")
@pytest.mark.proof
def test_a_sample_that_wants_more_memory_than_it_may_have_fails(struck: Any) -> None:
    assert struck()("much memory", 0).reward == 1.0
    one = struck(rm_memory=2**28)("much memory", 0)
    assert one.reward is None
    assert "MemoryError" in (one.error or "")


def test_a_process_that_ends_itself_is_tried_afresh_before_its_sample_fails(struck: Any) -> None:
    grade = struck()
    one = grade(f"signal {signal.SIGSEGV:d}", FRESH_PROCESSES)
    assert (one.reward, one.tries) == (0.5, 1 + FRESH_PROCESSES)
    one = grade(f"signal {signal.SIGSEGV:d}", FRESH_PROCESSES + 1)
    assert (one.reward, one.error) == (None, "the grader's process died with signal 11")


def test_a_signal_without_a_name_is_named_by_its_number() -> None:
    assert Ended(-signal.SIGSEGV, hung_up=False).signal == "SIGSEGV"
    assert Ended(-(signal.SIGRTMIN + 1), hung_up=False).signal == f"signal {signal.SIGRTMIN + 1}"
    assert Ended(1, hung_up=False).signal is None


@pytest.mark.proof
def test_a_grader_that_hangs_up_has_ended_itself(struck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.engines.processes.child.TO_END", 0.5)
    assert struck()("hang up", FRESH_PROCESSES + 1).error == "the grader closed the connection of its process"


@pytest.mark.proof
def test_a_process_whose_pool_died_before_it_heard_of_it_ends_without_a_word() -> None:
    here, there = Pipe()
    terms = ("sample", False, 1.0, 1, None)
    words = (there.fileno(), os.getpid(), "cairn.tasks.rewards.exact_match.grade", terms)
    code = f"from cairn.tasks.grading.worker import main; main(*{words!r})"
    with there:
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[there.fileno()], stderr=subprocess.PIPE, text=True
        )
    assert here.poll(60)
    here.close()  # what was sent is not read: the other end is reset
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


@pytest.mark.proof
def test_a_sample_fails_when_it_sleeps_in_every_process_or_computes_in_a_fresh_one(struck: Any) -> None:
    grade = struck(rm_timeout=0.5)
    assert grade("sleep", FRESH_PROCESSES).reward == 0.5
    assert grade("sleep", FRESH_PROCESSES + 1).error == "the grader took longer than 0.5 s"
    assert grade("compute", 1).reward == 0.5
    failed = grade("compute", 2)
    assert (failed.error, failed.tries) == ("the grader took longer than 0.5 s", 2)


@pytest.mark.proof
def test_a_process_that_is_stopped_is_given_up_without_blame(struck: Any) -> None:
    assert struck(rm_timeout=0.5)(f"signal {signal.SIGSTOP:d}", 1).reward == 0.5


def test_what_may_pass_is_tried_again_before_the_sample_fails(struck: Any) -> None:
    grade = struck()
    for response in ("connection", "try again", "status 429", "status 503", "group of connections"):
        one = grade(response, 3)
        assert (one.reward, one.tries) == (0.5, 4), response
        assert one.waited == pytest.approx(0.01 + 0.02 + 0.04), response
        one = grade(response, 4)
        assert (one.reward, one.tries) == (None, 4), response


def test_what_does_not_pass_is_not_tried_again(struck: Any) -> None:
    for response in ("status 404", "group with a mistake"):
        one = struck()(response, 1)
        assert (one.reward, one.tries) == (None, 1)
    named = struck(GraderRetries(retry_delay_seconds=0.01, errors=("Refused",)))
    assert named("status 403", 1).reward == 0.5


def test_an_error_is_told_in_text_that_can_be_stored(struck: Any) -> None:
    assert str(struck()("no text", 1).error).startswith(r"ValueError: half a pair: \ud83d (strikes.py:")


def test_a_service_that_is_gone_fails_no_sample_and_one_that_refuses_a_sample_does(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import os\n"
        "def grade(response, label, metadata):\n"
        f"    if response == 'bad' or os.path.exists({str(tmp_path / 'gone')!r}):\n"
        "        raise TimeoutError('no judge')\n"
        "    return 1.0\n"
    )
    config = RewardConfig(custom_rm_path=f"{tmp_path}/judge.py:grade")
    good, bad = Sample("good", None), Sample("bad", None)
    with GraderPool(config, GraderRetries(retries=2, retry_delay_seconds=0.01)) as pool:
        with pytest.raises(GraderUnavailable, match=r"1 of 1 samples in 3 tries, .* TimeoutError: no judge"):
            pool.grade([bad])  # nothing shows that the judge is there
        assert [g.reward for g in pool.grade([good, bad])] == [1.0, None]
        assert [g.reward for g in pool.grade([bad])] == [None]
        (tmp_path / "gone").touch()
        with pytest.raises(GraderUnavailable, match="fails on samples that it graded before"):
            pool.grade([good, bad])


@pytest.mark.parametrize("edited", ["mine.py", "helper.py"])
def test_a_new_process_never_grades_with_other_code_than_the_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper.py").write_text("REWARD = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "import os\nfrom helper import REWARD\n"
        "def grade(response, label, metadata):\n    return {'reward': REWARD, 'pid': os.getpid()}\n"
    )
    before = (tmp_path / edited).read_text()
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/mine.py:grade")) as pool:
        (first,) = pool.grade([Sample("", None)])
        assert first.components is not None
        (tmp_path / edited).write_text(before.replace("1.0", "2.0") + "# edited\n")
        assert pool.grade([Sample("", None)]) == [first], "the process that runs has the recorded code"
        os.kill(first.components["pid"], signal.SIGKILL)
        wait_for(lambda: pool._workers[0]._child.has_ended)
        with pytest.raises(GraderFailed, match=r"mine\.py:grade was changed while the run used it .* undo the change"):
            pool.grade([Sample("", None)])
        (tmp_path / edited).write_text(before)
        assert [g.reward for g in pool.grade([Sample("", None)])] == [1.0]
    sys.modules.pop("helper", None)


def test_processes_walk_their_sets_in_one_order(tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text(
        "def grade(response, label, metadata):\n    return {'reward': 0, 'order': list(set(map(str, range(50))))}\n"
    )
    orders = []
    for _ in range(2):
        with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/order.py:grade")) as pool:
            orders.append(pool.grade([Sample("", None)])[0].components)
    assert orders[0] == orders[1]


def test_a_grader_of_one_argument_gets_the_whole_sample(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(
        "import dataclasses\n"
        "def grade(sample):\n"
        "    return {'reward': -sample.length if sample.truncated else 1.0, **dataclasses.asdict(sample)}\n"
    )
    sample = Sample("a", "b", {"c": 1}, "a<end>", (1, 2, 3), "what?", (7, 8), "length", "truncated")
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/whole.py:grade")) as pool:
        (graded,) = pool.grade([sample])
    assert graded.reward == -3.0
    assert graded.components is not None
    assert graded.components["response_with_special_tokens"] == "a<end>"
    assert graded.components["prompt_ids"] == [7, 8]


def test_a_grader_of_other_arguments_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def grade(response, label):\n    return 1.0\n")
    with pytest.raises(BadPlugin, match=r"takes \(response, label\): let it take .*\(response, label, metadata\)"):
        GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/two.py:grade"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("async def grade(sample):\n    yield 1.0\n", "is an asynchronous generator function: let it be a plain or a"),
        ("def grade(sample):\n    yield 1.0\n", "is a generator function"),
    ],
)
def test_a_grader_that_returns_a_promise_is_refused_before_anything_starts(
    tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "later.py").write_text(source)
    with pytest.raises(BadPlugin, match=says):
        GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/later.py:grade"))


@pytest.mark.parametrize(
    ("parameters", "reward"),
    [
        ("sample, strict=True, penalty=0.5", 3.0),
        ("sample: Sample, *more", 3.0),
        ("response, label=None, metadata=None", 1.0),
        ("*given", 1.0),
    ],
)
def test_a_grader_with_options_of_its_own_gets_what_its_first_parameter_is_called_for(
    tmp_path: Path, parameters: str, reward: float
) -> None:
    (tmp_path / "options.py").write_text(
        "from cairn.tasks.rewards.sample import Sample\n"
        f"def grade({parameters}):\n"
        "    first = next(iter(locals().values()))\n"
        "    return float(first.length if isinstance(first, Sample) else 1)\n"
    )
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/options.py:grade")) as pool:
        (graded,) = pool.grade([Sample("a", None, response_ids=(1, 2, 3))])
    assert graded.reward == reward


def spent(code: str, until: Callable[[OwnTime], bool], stop: bool = False) -> OwnTime:
    """What a process that runs `code` has spent when `until` holds."""
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if stop:
            process.send_signal(signal.SIGSTOP)
        clock = OwnTime(process.pid, 0.05)
        wait_for(lambda: clock.tick() or until(clock))
        return clock
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.wait()


@pytest.mark.proof
def test_own_time_is_what_a_process_computes_and_what_it_sleeps_and_not_what_it_is_kept_waiting() -> None:
    computing = spent("while True: pass", lambda clock: clock.computed > 0.3)
    assert computing.slept < 0.2
    sleeping = spent("import time; time.sleep(600)", lambda clock: clock.slept > 0.3)
    assert sleeping.computed < 0.2
    stopped = spent("import time; time.sleep(600)", lambda clock: clock.stopped > 0.3, stop=True)
    assert stopped.own < 0.2
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    assert spent(child, lambda clock: clock.computed > 0.3).slept < 5


def test_a_look_that_comes_late_counts_as_no_more_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    now = 0.0
    monkeypatch.setattr("cairn.tasks.grading.process.time.monotonic", lambda: now)
    try:
        clock = OwnTime(process.pid, 0.05)
        now = 3600.0  # the machine was paused for an hour, and this process with it
        clock.tick()
        assert clock.watched == pytest.approx(0.1)
        assert clock.own <= 1.0
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ends_while_it_is_looked_at_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(started.pid)
    started.communicate(b"\n")
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert list(_thread_states(process)) == []


def test_a_process_that_ended_before_it_had_a_group_of_its_own_is_ended_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_between_fork_and_exec(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        started = popen(["false"], **options | {"start_new_session": False})
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        return started

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", killed_between_fork_and_exec)
    process = GraderProcess(get_grader(RewardConfig(rm_type="exact_match")), Terms(Takes.SAMPLE, False, 1.0, 1, None))
    process._launch()
    process.stop()
    assert process.kill() == 1
