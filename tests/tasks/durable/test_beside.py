"""Steps beside the driver: the same commits, the driver's own grader and the same errors."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineDied
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks import step_process
from cairn.tasks.durable import step as durable_step
from cairn.tasks.durable.beside import StepProcess
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.retries import error_class
from cairn.tasks.durable.step import GraderTerms
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.selecting.filter import BatchNotFilled
from cairn.tasks.step_process import MODULE, DriversGrader, Room
from tests.tasks.durable.raising import Mute
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

WHOLE = """
from cairn import Sample


def grade(sample: Sample) -> float:
    return sum(sample.response_ids) % 7 / 7 + (sample.prompt is not None)
"""


@pytest.fixture(scope="module")
def process() -> Iterator[StepProcess]:
    with closing(StepProcess(MODULE)) as opened:
        yield opened


@contextmanager
def driven(
    store: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, process: StepProcess | None
) -> Iterator[RunContext]:
    """A run whose steps run in a process beside it, however little they read; or in this one."""
    monkeypatch.setattr(durable_step, "BESIDE_BYTES", 0)
    with tiny_context(str(store), config) as (run, _):
        if process is not None:
            run.attach(process)
        yield run


def made(run: RunContext) -> list[Any]:
    iteration(run, DirectSteps(run), 0)
    commits = run.ledger.commits(0)
    return [
        (commit.name, [(one.content or one.sha256, one.rows) for one in commit.tables], commit.values, commit.metrics)
        for commit in commits
        if commit.step in (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.ADVANTAGE, Step.TRAIN)
    ]


def child_of(run: RunContext) -> int:
    process = run.attached(StepProcess)
    assert process is not None
    assert process._child is not None, "the witness that a step ran there"
    return process._child.pid


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_beside_the_driver_commit_what_they_would_in_it(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: StepProcess, whole: bool
) -> None:
    (tmp_path / "whole.py").write_text(WHOLE)
    reward = {"custom_rm_path": f"{tmp_path / 'whole.py'}:grade"} if whole else {}
    config = tiny_config(tiny_assets, reward=reward)
    with driven(tmp_path / "here", config, monkeypatch, None) as run:
        expected = made(run)
    with driven(tmp_path / "beside", config, monkeypatch, process) as run:
        graded, grade = list[int](), run.grader.grade
        monkeypatch.setattr(run.grader, "grade", lambda *asked: graded.append(os.getpid()) or grade(*asked))
        assert made(run) == expected
        assert set(graded) == {os.getpid()}
        assert child_of(run) != os.getpid()


@pytest.mark.slow
def test_an_error_beside_the_driver_is_raised_in_it_and_a_lost_process_is_replaced(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: StepProcess
) -> None:
    (tmp_path / "equal.py").write_text("def grade(response, label, metadata):\n    return 1.0\n")
    config = tiny_config(
        tiny_assets,
        rollout={"dynamic_sampling_filter": "check_reward_nonzero_std", "max_refill_rounds": 1},
        reward={"custom_rm_path": f"{tmp_path / 'equal.py'}:grade"},
    )
    with driven(tmp_path / "store", config, monkeypatch, process) as run:
        grade = run.grader.grade

        def striking(*asked: Any) -> Any:
            os.kill(child_of(run), signal.SIGKILL)
            return grade(*asked)

        with monkeypatch.context() as patch:
            patch.setattr(run.grader, "grade", striking)
            with pytest.raises(EngineDied, match="was lost"):
                iteration(run, DirectSteps(run), 0)
        with pytest.raises(BatchNotFilled, match="all samples of those groups have the same reward") as error:
            iteration(run, DirectSteps(run), 0)
        assert error.value.advice


def test_a_stopped_process_is_ended_and_replaced_and_a_busy_one_is_not() -> None:
    with closing(StepProcess("tests.tasks.durable.echo", silence=3.0)) as process:
        pid, answer = process.call(4.0, answer=lambda question: None)
        assert (answer, psutil.Process(pid).status() != psutil.STATUS_STOPPED) == (4.0, True)
        with pytest.raises(EngineDied, match="was lost: it sent no sign of life for long") as lost:
            process.call("stop", answer=lambda question: None)
        assert error_class(lost.value) == "engine_died"
        assert not psutil.pid_exists(pid)
        assert process.call("again", answer=lambda question: None) not in ((pid, "again"), None)


def test_what_the_grader_raises_reaches_the_driver_as_it_was(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: StepProcess
) -> None:
    class Full(Exception):
        """One that no other process can load."""

    with driven(tmp_path, tiny_config(tiny_assets), monkeypatch, process) as run:
        error = Full("no room")

        def failing(*asked: Any) -> Any:
            raise error

        monkeypatch.setattr(run.grader, "grade", failing)
        with pytest.raises(Full) as raised:
            iteration(run, DirectSteps(run), 0)
        assert raised.value is error


def test_user_code_that_was_changed_before_the_process_loads_it_is_refused(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: StepProcess
) -> None:
    file = tmp_path / "keeping.py"
    file.write_text("def keep(samples):\n    return True\n")
    config = tiny_config(tiny_assets, rollout={"dynamic_sampling_filter": f"{file}:keep"})
    with driven(tmp_path / "store", config, monkeypatch, process) as run:
        file.write_text("def keep(samples):\n    return True  # in another way\n")
        with pytest.raises(BadPlugin, match=r"keeping\.py:keep was changed while the run used it"):
            iteration(run, DirectSteps(run), 0)
        assert run.find(0, Step.FILTER, "00") is None


@pytest.fixture(scope="module")
def raising() -> Iterator[StepProcess]:
    with closing(StepProcess("tests.tasks.durable.raising")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("exit", RuntimeError, "SystemExit: enough"),
        ("cancelled", RuntimeError, "CancelledError: late"),
        ("interrupted", RuntimeError, "KeyboardInterrupt"),
        ("mute", Mute, None),
        ("cannot be loaded", RuntimeError, "Demanding: no key in row 3"),
        ("cannot be dumped", RuntimeError, "KeyError"),
        ("common", KeyError, "'answer'"),
    ],
)
def test_whatever_a_body_raises_ends_its_call_with_the_place_of_the_error(
    raising: StepProcess, name: str, kind: type[Exception], text: str | None
) -> None:
    pool = ThreadPoolExecutor(1)
    call = pool.submit(raising.call, name, lambda question: question)
    pool.shutdown(wait=False)
    with pytest.raises(kind) as error:
        call.result(20)
    assert type(error.value) is kind
    assert text is None or text in str(error.value)
    assert "in users_function" in str(error.value.__cause__)


@pytest.mark.timeout(60)
def test_room_is_for_some_amounts_at_a_time_and_for_a_larger_one_alone() -> None:
    room, most = Room(10), 0

    def hold(amount: int) -> None:
        nonlocal most
        with room.holding(amount):
            with changed:
                held[threading.get_ident()] = amount
                most = max(most, sum(held.values()) if len(held) > 1 else 0)
            time.sleep(0.002)
            with changed:
                del held[threading.get_ident()]

    held: dict[int, int] = {}
    changed = threading.Lock()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(hold, [4, 5, 30, 6, 1, 30, 9, 2] * 5))
    assert 0 < most <= 10


@pytest.mark.parametrize(
    ("groups", "asked"),
    [
        (None, [[0, 1], [2, 3], [4, 5], [6]]),
        ("aabbcca", [[0, 1, 2, 3, 4, 5, 6]]),
        ("aabbccc", [[0, 1], [2, 3], [4, 5, 6]]),
    ],
)
def test_a_question_about_long_responses_has_whole_calls_of_the_grader(
    groups: str | None, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_process, "TEXT_OF_A_QUESTION", 25)
    samples = [Sample(response=str(number) * 10, label="", metadata={}) for number in range(7)]
    questions: list[list[int]] = []

    def answer(question: Any) -> list[Graded]:
        questions.append([samples.index(sample) for sample in question[0]])
        assert groups is None or question[1] == [groups[number] for number in questions[-1]]
        return [Graded(float(sample.response[0])) for sample in question[0]]

    terms = GraderTerms("own", "1", sees_whole_samples=False, sees_tokens=False, by_group=groups is not None)
    graded = DriversGrader(terms, 2, answer).grade(samples, None if groups is None else list(groups))
    assert [one.reward for one in graded] == list(range(7))
    assert questions == asked


def test_only_tables_that_the_driver_would_have_to_read_count_as_much(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = str(tmp_path), tiny_config(tiny_assets, rollout={"num_rollout": 1})
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        graded = run.committed(0, Step.REWARD, "00-000")
    monkeypatch.setattr(durable_step, "BESIDE_BYTES", 1)
    with tiny_context(store, config) as (run, _):
        assert durable_step._reads_much(run, [[graded], None])
        run.read(graded)
        assert not durable_step._reads_much(run, [[graded], None])
