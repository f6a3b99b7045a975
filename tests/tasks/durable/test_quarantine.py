"""Prompts in quarantine: not drawn any more, and every iteration can still be done again exactly."""

from pathlib import Path

import pytest

from cairn.configs.errors import BadData
from cairn.configs.schema.run import RunConfig
from cairn.flows.history.fork import fork
from cairn.flows.history.replay import replay
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.decisions import InForce, Quarantine
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.data.stream import order
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.quarantine import apply_requests, skipped_prompts
from tests.tiny_run import PROMPTS, DirectSteps, tiny_config, tiny_context


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    """Every prompt is drawn once in six iterations, so a second pass begins in the seventh."""
    return tiny_config(
        tiny_assets,
        rollout={"num_rollout": 3, "rollout_batch_size": len(PROMPTS) // 2, "n_samples_per_prompt": 2},
        checkpoint={"save_interval": 1},
    )


def drawn(run: RunContext, index: int) -> list[int]:
    """The rows of the data set that an iteration generated from, in their order."""
    table = run.read(run.committed(index, Step.ROLLOUT, "00-000"), ["prompt_index"])
    return table.column("prompt_index").to_pylist()[::2]


def decide(ledger: Ledger, prompt: int, passed_over: bool = True) -> None:
    ledger.decisions.record(lambda so_far: Quarantine(prompt=prompt, passed_over=passed_over))


def drive(run: RunContext, index: int) -> None:
    apply_requests(run, index)
    iteration(run, DirectSteps(run), index)


def test_a_prompt_is_passed_over_from_the_next_iteration_on_and_every_iteration_is_done_again_alike(
    config: RunConfig, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), config) as (run, _):
        drive(run, 0)
        one, two = (order(run.config.seed, epoch, len(PROMPTS)).tolist() for epoch in range(2))
        assert drawn(run, 0) == one[:12]
        early = set(two[2:12])  # drawn again in iteration 2
        bad = next(row for row in one[12:] if row in early)
        good = next(row for row in one[:12] if row in early)
        decide(run.ledger, bad)
        decide(run.ledger, good)
        assert skipped_prompts(run.ledger, 1) == []
        drive(run, 1)
        assert drawn(run, 1) == [*(row for row in one[12:] if row != bad), two[0]]
        assert (skipped_prompts(run.ledger, 0), skipped_prompts(run.ledger, 1)) == ([], sorted([bad, good]))
        decide(run.ledger, bad, passed_over=False)
        assert skipped_prompts(run.ledger, 1) == sorted([bad, good]), "what is in force stays so"
        child = fork(run.ledger, 1, "child", ["training.lr=0.002"])
        assert skipped_prompts(child, 2) == sorted([bad, good]), "as where it parted"
        drive(run, 2)
        assert drawn(run, 2) == [row for row in two[1:] if row != good][:12]
        assert bad in drawn(run, 2)

    ledger = Ledger.open(open_store(str(tmp_path)), "tiny")
    assert [d.what.iteration for d in ledger.decisions.all() if isinstance(d.what, InForce)] == [1, 2]
    for index in range(3):
        with tiny_context(str(tmp_path), config) as (run, events):
            drive(run, index)  # a driver that comes back adopts every step
            assert events.executed() == []
    assert [replayed.differences for replayed in replay(ledger, 1, Step.FILTER)] == [()]


def test_an_iteration_that_has_begun_is_finished_as_it_began(config: RunConfig, tmp_path: Path) -> None:
    with tiny_context(str(tmp_path), config) as (run, _):
        log = run.ledger.attempt(0, Step.ROLLOUT, "00-000")
        log.store.write(log.path("write_ahead/000000.0.arrow"), b"finished samples")
        decide(run.ledger, 0)
        apply_requests(run, 0)
        assert skipped_prompts(run.ledger, 0) == []
        apply_requests(run, 1)
        assert skipped_prompts(run.ledger, 1) == [0]


def test_where_nothing_is_left_to_draw_the_run_says_so(config: RunConfig, tmp_path: Path) -> None:
    everything = pytest.raises(BadData, match=r"every prompt of .* is in quarantine: release some of them")
    with tiny_context(str(tmp_path), config) as (run, _), everything:
        run.draw(0, 1, range(len(PROMPTS)))
