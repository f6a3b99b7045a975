"""A rollout that was killed half way keeps what had finished, generates the rest, and says so."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import Completion, GenerateRequest, RequestId
from cairn.flows.cli.printing import print_parts
from cairn.flows.cli.tables import status_lines
from cairn.flows.iteration import iteration
from cairn.flows.reading.views import Groups, run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.opening import open_store
from tests.local_fleet import LocalFleet, calls
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

GROUPS, SAMPLES = 6, 4


def dying_fleet(config: RunConfig, samples: int) -> LocalFleet:
    """Its driver is gone as soon as so many samples have finished."""
    fleet = LocalFleet(config)
    generate = fleet.rollout[0].generate

    def generate_until_the_end(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        finished = 0
        for completions in generate(requests):
            yield completions
            finished += len(completions)
            if finished >= samples:
                raise KeyboardInterrupt

    engine: Any = fleet.rollout[0]
    engine.open = calls(generate_until_the_end)
    return fleet


@pytest.mark.parametrize("scheme", ["file", pytest.param("s3", marks=pytest.mark.proof)])
def test_only_the_missing_groups_are_generated_and_status_counts_them(
    tiny_assets: Path, tmp_path: Path, s3_url: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # One group at a time, so that groups finish one after the other.
    rollout = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "max_running_requests": SAMPLES}
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1, "rollout_max_response_len": 12, **rollout})
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        undisturbed = train_digests(run, [0])

    store = s3_url if scheme == "s3" else str(tmp_path / "killed")
    dying = dying_fleet(config, GROUPS * SAMPLES // 2)
    with tiny_context(store, config, fleet=dying) as (run, _), pytest.raises(KeyboardInterrupt):
        iteration(run, DirectSteps(run), 0)
    killed = run_status(open_store(store), "tiny")
    assert killed.groups == Groups(waiting=GROUPS // 2)
    print_parts(status_lines(killed))
    assert "3 finished and stored for the next driver" in capsys.readouterr().out

    fleet = LocalFleet(config)
    with tiny_context(store, config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert train_digests(run, [0]) == undisturbed
    assert fleet.rollout[0].generated_groups == GROUPS - GROUPS // 2
    done = run_status(open_store(store), "tiny")
    assert done.groups == Groups(generated=GROUPS - GROUPS // 2, recovered=GROUPS // 2)
    print_parts(status_lines(done))
    assert "3 reused from an interrupted rollout, 3 generated" in capsys.readouterr().out


def test_a_sample_that_had_finished_is_kept_though_its_group_had_not(tiny_assets: Path, tmp_path: Path) -> None:
    rollout = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 30}
    ends = {"rollout_stop_token_ids": tuple(range(3, 12))}  # so that responses end at different times
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1, **rollout, **ends})
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        undisturbed = train_digests(run, [0])
    with (
        tiny_context(str(tmp_path / "killed"), config, fleet=dying_fleet(config, 9)) as (run, _),
        pytest.raises(KeyboardInterrupt),
    ):
        iteration(run, DirectSteps(run), 0)

    fleet = LocalFleet(config)
    requested: list[RequestId] = []
    generate = fleet.rollout[0].generate

    def counting(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        requested.extend(request.request_id[:2] for request in requests)
        return generate(requests)

    fleet.rollout[0].open = calls(counting)  # type: ignore[method-assign]
    with tiny_context(str(tmp_path / "killed"), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert train_digests(run, [0]) == undisturbed
        stored = GROUPS * SAMPLES - len(requested)
        assert stored >= 9
        groups = {group for group, _ in requested}
        assert len(groups) > GROUPS - stored // SAMPLES, "the witness of a group that was part done"
        (repeated,) = [commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT]
        assert repeated.metrics["generated_groups"] == len(groups)
