"""TensorBoard shows what the ledger holds: each iteration once, whatever happened to its drivers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from cairn.configs.errors import ConfigError
from cairn.flows.events import IterationDone, RunDone, RunStarted
from cairn.flows.reading.metrics import find_metric
from cairn.flows.watching.trackers import trackers
from cairn.flows.watching.watchers import Watchers
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import Message
from tests.flows.written_runs import config_of, new_run, write_iteration, write_run
from tests.small_disk import fill, small_disk, why_not


@contextmanager
def tracked(ledger: Ledger) -> Iterator[tuple[Watchers, list[str]]]:
    """Whom a driver tells, and the warnings that its person is shown."""
    said: list[str] = []
    watchers = Watchers(lambda event: said.append(event.text) if isinstance(event, Message) else None)
    with watchers.attached(trackers(ledger, config_of(ledger))):
        yield watchers, said


def drive(ledger: Ledger, first: int, last: int) -> list[str]:
    """What a driver of the iterations [first, last) tells the trackers. Returns the warnings."""
    with tracked(ledger) as (watchers, said):
        watchers(RunStarted(ledger.run, 1, first, config_of(ledger).rollout.num_rollout))
        for iteration in range(first, last):
            watchers(IterationDone(iteration, tuple(ledger.commits(iteration))))
    return said


def shown(folder: Path) -> dict[str, list[int]]:
    """The steps of every metric as TensorBoard reads them, sorted."""
    board = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    board.Reload()
    return {tag: sorted(event.step for event in board.Tensors(tag)) for tag in board.Tags()["tensors"]}


def points_in_files(folder: Path) -> list[tuple[str, int]]:
    """Every point that the files hold, doubled ones too."""
    return [
        (value.tag, event.step)
        for file in sorted(folder.glob("events.*"))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return tmp_path / "board" / "toy"


@pytest.fixture
def ledger(tmp_path: Path, board: Path) -> Ledger:
    ledger = new_run(str(tmp_path), tracking={"tensorboard_dir": str(board.parent)})
    write_run(ledger, 3)
    return ledger


def test_every_iteration_and_every_evaluation_is_one_point(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 3)
    steps = shown(board)
    assert steps["rollout/raw_reward"] == steps["train/loss"] == steps["perf/step_time"] == [0, 1, 2]
    assert steps["eval/heldout"] == [0, 2, 3]
    assert steps["perf/checkpoint_bytes"] == [1, 2]


def test_values_and_times_are_those_of_the_commits(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 3)
    accumulator = EventAccumulator(str(board), size_guidance={"tensors": 0})
    accumulator.Reload()
    score = accumulator.Tensors("eval/heldout")[1]
    assert score.tensor_proto.float_val[0] == 0.75
    assert score.wall_time == max(commit.committed_at for commit in ledger.commits(1))


def test_a_resumed_run_doubles_nothing(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 2)
    drive(ledger, 1, 3)  # iteration 1 was committed, but its driver died before it knew
    points = points_in_files(board)
    assert len(points) == len(set(points))
    assert shown(board)["train/loss"] == [0, 1, 2]


def test_what_a_killed_driver_committed_and_did_not_write_is_written_by_the_next(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 1)
    drive(ledger, 2, 3)
    assert shown(board)["train/loss"] == [0, 1, 2]
    assert shown(board)["eval/heldout"] == [0, 2, 3]


def test_a_driver_that_has_lost_the_run_writes_no_more(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 2)
    before = points_in_files(board)
    Ledger.open(ledger.store, ledger.run).acquire(takeover=True)
    (warning,) = drive(ledger, 2, 3)
    assert warning.startswith("TensorBoard is off for the rest of this driver: ")
    assert points_in_files(board) == before


def test_what_an_event_that_was_missed_told_is_written_all_the_same(ledger: Ledger, board: Path) -> None:
    with tracked(ledger) as (watchers, _):
        watchers(IterationDone(1, tuple(ledger.commits(1))))
        watchers(RunDone(ledger.run, 3, "0" * 64))
    assert shown(board)["train/loss"] == [0, 1, 2]


def test_a_deleted_folder_comes_back_whole(ledger: Ledger, board: Path) -> None:
    drive(ledger, 3, 3)
    assert shown(board)["train/loss"] == [0, 1, 2]


def test_a_torn_file_is_read_up_to_the_tear_and_the_rest_is_written_again(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 3)
    (file,) = board.glob("events.*")
    file.write_bytes(file.read_bytes()[:-10])
    drive(ledger, 3, 3)
    points = points_in_files(board)
    assert len(points) == len(set(points))
    assert shown(board)["train/loss"] == [0, 1, 2]


def test_an_evaluation_between_iterations_is_not_taken_for_one(tmp_path: Path, board: Path) -> None:
    ledger = new_run(str(tmp_path), tracking={"tensorboard_dir": str(board.parent)}, eval={"eval_interval": 1})
    write_iteration(ledger, 0)
    drive(ledger, 0, 1)
    write_iteration(ledger, 1)
    drive(ledger, 1, 2)
    assert shown(board)["train/loss"] == [0, 1]
    assert shown(board)["eval/heldout"] == [0, 1, 2]


def test_every_metric_shown_is_documented(ledger: Ledger, board: Path) -> None:
    drive(ledger, 0, 3)
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    for name in shown(board):
        metric = find_metric(name)
        assert metric is not None, name
        assert f"`{metric.name}`" in page


def test_null_writes_nothing(tmp_path: Path, board: Path) -> None:
    ledger = new_run(str(tmp_path), "silent", tracking={"tensorboard_dir": None})
    write_iteration(ledger, 0)
    drive(ledger, 0, 1)
    assert not board.parent.exists()


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ledger = new_run(str(tmp_path), tracking={"tensorboard_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"tracking\.tensorboard_dir cannot be written .* set another folder"):
        drive(ledger, 0, 0)


def test_a_run_that_fails_leaves_the_rest_to_the_next_driver(ledger: Ledger, board: Path) -> None:
    def interrupted() -> None:
        with tracked(ledger) as (watchers, _):
            watchers(RunStarted(ledger.run, 1, 2, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    drive(ledger, 2, 3)
    points = points_in_files(board)
    assert len(points) == len(set(points))
    assert shown(board)["train/loss"] == [0, 1, 2]


def drive_until_full(ledger: Ledger, disk: Path, error: Exception | None = None) -> list[str]:
    """Tell of iterations of which none fits on the disk, and then fail if there is an error to fail with."""
    with tracked(ledger) as (watchers, said):
        fill(disk)
        for iteration in range(3):
            watchers(IterationDone(iteration, tuple(ledger.commits(iteration))))
        if error is not None:
            raise error
    return said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_folder_without_space_is_named_and_neither_ends_a_run_nor_hides_its_error(
    ledger: Ledger, board: Path
) -> None:
    with small_disk(board.parent, 2**20) as disk:
        with pytest.raises(ValueError, match="of the run"):
            drive_until_full(ledger, disk, ValueError("of the run"))
        (disk / "ballast").unlink()
        (warning,) = drive_until_full(ledger, disk)
        assert f"cannot write to {board}: no space is left there; free some" in warning
        (disk / "ballast").unlink()
        assert drive(ledger, 0, 3) == []
        assert shown(board)["train/loss"] == [0, 1, 2]
