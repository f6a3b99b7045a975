"""Nothing that a grader does harms the pool or another sample."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.processes.child import output_file
from cairn.engines.types.errors import GraderFailed
from cairn.flows.driver.sources import open_graders
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.pool import FRESH_PROCESSES, GraderPool
from cairn.tasks.rewards import dapo
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

GRADER = """
import os, re, signal, sys, time

def grade(response, label, metadata):
    if "told" in metadata:
        open(metadata["told"], "w").close()
    if response == "hang":
        time.sleep(60)
    if response == "hang with the interpreter locked":
        re.match("(a|a)*b", "a" * 60)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "exit":
        sys.exit(3)
    if response == "exit at once":
        os._exit(3)
    if response == "nan":
        return float("nan")
    if response == "huge":
        return -1e39
    if response == "the largest":
        return 3.4028235e38
    if response == "nothing":
        return None
    if response == "components":
        return {"reward": 0.5, "format": 1, "answer": "7"}
    if response == "pid":
        return os.getpid()
    if response == "modules":
        return {"reward": 0, "modules": sorted(sys.modules)}
    print("noise on standard output")
    return float(response == label) + len(metadata)
"""


def grade(pool: GraderPool, samples: Sequence[tuple[str, str | None, dict[str, Any]]]) -> list[Graded]:
    return pool.grade([Sample(*sample) for sample in samples])


@pytest.fixture
def pool_of(tmp_path: Path):
    (tmp_path / "graders.py").write_text(GRADER)
    pools: list[GraderPool] = []

    def make(**options) -> GraderPool:
        options.setdefault("custom_rm_path", f"{tmp_path}/graders.py:grade")
        pools.append(GraderPool(RewardConfig(**options)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_what_a_grader_prints_is_in_a_file_of_its_own(
    pool_of: Callable[..., GraderPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    grade(pool_of(num_workers=1), [("a", "a", {}), ("b", "a", {})])
    assert output_file("graders.py:grade").read_text() == "noise on standard output\n" * 2
    assert "noise" not in "".join(capfd.readouterr())


def test_results_stand_in_the_order_of_the_samples(pool_of):
    pool = pool_of(num_workers=2)
    samples = [(str(i % 3), "1", {"x": 1} if i % 2 else {}) for i in range(50)]
    expected = [Graded(float(i % 3 == 1) + (i % 2)) for i in range(50)]
    assert grade(pool, samples) == expected
    assert grade(pool, []) == []


def test_components_are_recorded_beside_the_reward(pool_of):
    (graded,) = grade(pool_of(), [("components", None, {})])
    assert graded == Graded(0.5, {"format": 1, "answer": "7"})


FAILING = {
    "raise": r"KeyError: 'no such thing' \(graders.py:\d+\)",
    "nan": "returned nan, which is not a reward",
    "huge": r"returned -1e\+39, which is not a reward: the maximum of float32 is 3.4e38",
    "nothing": "TypeError",
    "exit": "SystemExit: 3",
}
ENDING = {"crash": "died with signal 11", "exit at once": "died with exit code 3"}
HANGING = {"hang with the interpreter locked": "took longer than 0.5 s"}


@pytest.mark.parametrize(
    ("responses", "seconds"),
    [
        (FAILING, 60),
        pytest.param(ENDING, 60, marks=pytest.mark.proof),
        pytest.param(HANGING, 0.5, marks=pytest.mark.proof),
    ],
    ids=["fails", "ends its process", "hangs"],
)
def test_a_failing_sample_has_an_error_and_its_neighbours_their_rewards(pool_of, responses, seconds):
    pool = pool_of(rm_timeout=seconds)
    for response, error in responses.items():
        graded = grade(pool, [("1", "1", {}), (response, "1", {}), ("1", "1", {}), (response, "1", {}), ("0", "1", {})])
        assert [g.reward for g in graded] == [1.0, None, 1.0, None, 0.0], response
        for failed in (graded[1], graded[3]):
            assert re.search(error, failed.error or ""), (response, failed.error)


@pytest.mark.proof
def test_a_hung_sample_is_tried_again_by_itself_and_no_other_with_it(pool_of):
    pool = pool_of(rm_timeout=1, num_workers=2)
    grade(pool, [("1", "1", {})] * 8)
    graded = grade(pool, [("hang", "1", {})] + [("1", "1", {})] * 63)
    assert [g.reward for g in graded] == [None] + [1.0] * 63
    assert [g.tries for g in graded] == [1 + FRESH_PROCESSES] + [1] * 63, "eight samples are handed over at once"


def test_processes_are_reused_from_batch_to_batch(pool_of):
    pool = pool_of()
    pids = {grade(pool, [("pid", None, {})])[0].reward for _ in range(5)}
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_batches_of_several_threads_share_the_processes(pool_of):
    pool = pool_of(num_workers=2)
    results: dict[int, list[Graded]] = {}

    def grade_some(index: int) -> None:
        results[index] = grade(pool, [(str(index), str(i), {}) for i in range(20)])

    threads = [threading.Thread(target=grade_some, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: [g.reward for g in graded].index(1.0) for i, graded in results.items()} == {i: i for i in range(6)}


def test_a_grader_process_imports_its_grader_and_little_else(pool_of):
    graded = grade(pool_of(), [("modules", None, {})])[0]
    assert graded.components is not None
    roots = {name.partition(".")[0] for name in graded.components["modules"]}
    assert not roots & {
        "sympy",
        "math_verify",
        "torch",
        "transformers",
        "numpy",
        "prefect",
        "ray",
        "pydantic",
        "pytest",
    }


@pytest.mark.proof
def test_a_process_that_died_between_batches_costs_no_sample(pool_of):
    pool = pool_of()
    pid = grade(pool, [("pid", None, {})])[0].reward
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: not _runs(int(pid)))
    graded = grade(pool, [("1", "1", {}), ("1", "1", {})])
    assert [g.reward for g in graded] == [1.0, 1.0]


@pytest.mark.proof
def test_a_process_that_was_stopped_before_it_took_its_samples_costs_none(pool_of):
    pool = pool_of(rm_timeout=1, num_workers=1)
    pid = grade(pool, [("pid", None, {})])[0].reward
    os.kill(int(pid), signal.SIGSTOP)
    graded = grade(pool, [("x" * 10**7, "1", {}), ("1", "1", {})])  # more than a pipe holds
    assert [(g.reward, g.error) for g in graded] == [(0.0, None), (1.0, None)]


@pytest.mark.proof
def test_cheap_samples_take_about_a_millisecond_at_most(pool_of):
    pool = pool_of(custom_rm_path=None, rm_type="exact_match")
    samples = [(r"the digits in order are \boxed{1 3 4 7 9}", "1 3 4 7 9", {})] * 256
    assert all(g.reward == 1.0 for g in grade(pool, samples))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        grade(pool, samples)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.3


def test_math_is_graded_in_the_pool_with_the_pools_deadline(pool_of):
    pool = pool_of(custom_rm_path=None, rm_type="math", rm_timeout=5.0)
    graded = grade(pool, [(r"\boxed{\frac12}", "0.5", {}), (r"\boxed{2}", "3", {}), ("2", None, {})])
    assert [g.reward for g in graded] == [1.0, 0.0, None]
    assert "needs a label" in (graded[2].error or "")


def test_an_answer_that_holds_a_grader_of_ours_past_its_deadline_is_wrong_and_fails_nobody(pool_of):
    pool = pool_of(custom_rm_path=None, rm_type="math", rm_timeout=0.05)
    slow = "(" * 10 + "1" + ")" * 10  # a third of a second for the parser
    right, late = (Sample(rf"\boxed{{{box}}}", "2") for box in ("2", slow))
    graded = pool.grade([right, late, right])
    assert [g.reward for g in graded] == [1.0, 0.0, 1.0]
    assert graded[1] == Graded(0.0, {"error": "the grader took longer than 0.05 s"})


def test_a_wrong_answer_is_what_the_grader_says_it_is():
    wrong = {name: get_grader(RewardConfig(rm_type=name)).wrong for name in ("math", "dapo", "boxed_f1", "episode")}
    assert wrong == {"math": 0.0, "dapo": -1.0, "boxed_f1": 0.0, "episode": None}
    assert dapo.grade(Sample("Answer: 1", "2"))["reward"] == wrong["dapo"]


def test_a_grader_that_cannot_be_imported_is_an_error_of_the_pool(pool_of, tmp_path):
    with pytest.raises(BadPlugin, match="no grader 'maths'"):
        pool_of(custom_rm_path=None, rm_type="maths")
    (tmp_path / "elsewhere.py").write_text(
        "import os\n"
        "if os.environ.get('HERE') is None:\n    raise OSError('not here')\n"
        "def grade(response, label, metadata):\n    return 1.0\n"
    )
    os.environ["HERE"] = "yes"
    try:
        pool = pool_of(custom_rm_path=f"{tmp_path}/elsewhere.py:grade")
        assert grade(pool, [("", None, {})])[0].reward == 1.0
        os.kill(pool._workers[0]._child.pid, signal.SIGKILL)
    finally:
        del os.environ["HERE"]
    with pytest.raises(GraderFailed, match=r"elsewhere\.py:grade ended while it loaded the grader"):
        grade(pool, [("", None, {})] * 2)


@pytest.mark.proof
def test_close_ends_a_busy_process_at_once(pool_of, tmp_path):
    pool = pool_of(rm_timeout=60)
    pid = int(grade(pool, [("pid", None, {})])[0].reward)
    outcome: list[BaseException] = []

    def grade_until_closed() -> None:
        try:
            grade(pool, [("hang", None, {"told": str(tmp_path / "hangs")})] * 3)
        except GraderFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=grade_until_closed)
    thread.start()
    wait_for((tmp_path / "hangs").exists)
    pool.close()
    thread.join(30)
    assert "closed" in str(outcome[0])
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("busy_with", ["nothing", "hang with the interpreter locked"])
@pytest.mark.proof
def test_processes_die_with_their_driver_however_it_ends(tmp_path, busy_with):
    (tmp_path / "graders.py").write_text(GRADER)
    metadata = {"told": str(tmp_path / "hangs")}
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from cairn.configs.schema.reward import RewardConfig\n"
            "from cairn.tasks.grading.pool import GraderPool\n"
            "from cairn.tasks.rewards.sample import Sample\n"
            f"pool = GraderPool(RewardConfig(custom_rm_path={str(tmp_path / 'graders.py:grade')!r}, rm_timeout=60))\n"
            "print(int(pool.grade([Sample('pid', None)])[0].reward), flush=True)\n"
            f"if {busy_with!r} != 'nothing': pool.grade([Sample({busy_with!r}, None, {metadata!r})])\n"
            "sys.stdin.read()\n",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    if busy_with != "nothing":
        wait_for((tmp_path / "hangs").exists)
    assert psutil.pid_exists(pid)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    wait_for(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_benchmark_that_names_a_grader_is_not_graded_by_the_users_code(tiny_assets):
    benchmark = {"path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4}
    benchmarks = [{**benchmark, "name": "own", "rm_type": "math"}, {**benchmark, "name": "shared"}]
    config = tiny_config(tiny_assets, eval={"benchmarks": benchmarks})
    assert config.reward.rm_type == "math"
    assert config.reward.custom_rm_path is not None
    with ExitStack() as stack:
        graders = open_graders(config, stack)
        assert graders["shared"] is graders[None]
        assert grade(graders["own"], [(r"\boxed{\frac12}", "0.5", {})])[0].reward == 1.0
