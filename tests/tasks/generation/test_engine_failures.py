"""What befalls an engine does not change what is trained: only its own word on a prompt does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import Status
from tests.local_fleet import LocalFleet, calls
from tests.requests import grouped
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

STRIKES = 6
"""More than the tries after which an engine's own failures count against a group."""
Generated = Iterator[list[Completion]]


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    # One group at a time: its samples have the same company on every machine, batch-invariant or not.
    rollout = {"num_rollout": 1, "rollout_batch_size": 4, "max_running_requests": 4, "rollout_max_response_len": 8}
    return tiny_config(tiny_assets, rollout=rollout)


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return trained(tmp_path_factory.mktemp("undisturbed"), config, LocalFleet(config))


def trained(store: Path, config: RunConfig, fleet: LocalFleet, tries: int = 1) -> list[str | None]:
    """The state digest of a run whose step fails in all tries but the last."""
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        for _ in range(tries - 1):
            with pytest.raises(EngineError):
                iteration(run, DirectSteps(run), 0)
        commits = iteration(run, DirectSteps(run), 0)
        samples = [row for c in commits if c.step is Step.ROLLOUT for row in run.read(c).to_pylist()]
        assert all(row["status"] != Status.FAILED for row in samples)
        return train_digests(run, [0])


def struck(config: RunConfig, strike: Callable[[list[Completion]], list[Completion]]) -> LocalFleet:
    """Its engine is struck as soon as samples of the second prompt come, `STRIKES` times."""
    fleet = LocalFleet(config)
    generate, struck = fleet.rollout[0].generate, 0

    def disturbed(requests: Sequence[GenerateRequest]) -> Generated:
        nonlocal struck
        for completions in generate(requests):
            hit = struck < STRIKES and any(completion.request_id[0] % 4 == 1 for completion in completions)
            struck += hit
            yield strike(completions) if hit else completions

    engine: Any = fleet.rollout[0]
    engine.open = calls(disturbed)
    return fleet


def raising(error: Exception) -> Callable[[list[Completion]], list[Completion]]:
    def strike(completions: list[Completion]) -> list[Completion]:
        raise error

    return strike


def aborted(completions: list[Completion]) -> list[Completion]:
    return [replace(completion, finish_reason=FinishReason.ABORT) for completion in completions]


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(raising(EngineDied("the actor's process is gone")), id="it dies"),
        pytest.param(aborted, id="somebody aborts it"),
    ],
)
def test_a_healthy_prompt_survives_whatever_befalls_its_engine(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path, strike: Any
) -> None:
    assert trained(tmp_path, config, struck(config, strike), STRIKES + 1) == undisturbed


def test_a_step_goes_on_without_a_prompt_over_which_alone_its_engine_hangs_again(
    config: RunConfig, tmp_path: Path
) -> None:
    fleet = struck(config, raising(EngineTimeout("generate() did not end within 600 s")))
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        for _ in range(3):  # with others, and twice alone
            with pytest.raises(EngineTimeout):
                iteration(run, DirectSteps(run), 0)
        commits = iteration(run, DirectSteps(run), 0)
        samples = [row for c in commits if c.step is Step.ROLLOUT for row in run.read(c).to_pylist()]
        failed = {row["group_id"]: row["error"] for row in samples if row["status"] == Status.FAILED}
        message = "EngineTimeout: an engine exceeded its timeout 2 times on this group alone"
        assert failed == {1: message}


@pytest.mark.parametrize("error", [EngineDied("the actor's process is gone"), EngineTimeout("generate() did not end")])
def test_a_prompt_that_ends_its_engine_every_time_is_named_with_the_way_out(
    config: RunConfig, tmp_path: Path, error: EngineError
) -> None:
    fleet = struck(config, raising(error))
    messages = []
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        row = run.draw(0, 4).rows[1].index + 1
        for _ in range(3):
            with pytest.raises(type(error)) as caught:
                iteration(run, DirectSteps(run), 0)
            messages.append(str(caught.value))
    assert messages[0] == str(error)
    for times, sentence in enumerate(messages[1:], 2):
        assert f"an engine was lost {times} times, each time with row {row} of data.path unfinished" in sentence
        assert "remove its row from the data, or generate fewer samples at a time (rollout.max_r" in sentence


def test_where_no_prompt_was_there_every_time_none_is_named(config: RunConfig, tmp_path: Path) -> None:
    fleet = LocalFleet(config)
    engine: Any = fleet.rollout[0]
    generate_samples = engine.generate_samples

    def dying(samples: Sequence[SampleRequest], *options: Any) -> Iterator[list[GeneratedSample]]:
        """Once it has finished a group."""
        yield from generate_samples([one for one in samples if one.group_id == samples[0].group_id], *options)
        raise EngineDied("gone")

    engine.generate_samples = dying
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        for left in (3, 2, 1):
            with pytest.raises(EngineDied) as caught:
                iteration(run, DirectSteps(run), 0)
            assert ("row" in str(caught.value)) == (left < 3)
        with pytest.raises(EngineDied, match="but no prompt was unfinished each time"):
            iteration(run, DirectSteps(run), 0)


def test_a_prompt_that_the_engine_fails_on_in_company_is_a_group_like_any_other_if_alone_it_does_not(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path
) -> None:
    fleet = LocalFleet(config)
    generate = fleet.rollout[0].generate

    def fails_in_company(requests: Sequence[GenerateRequest]) -> Generated:
        if len(list(grouped(requests))) > 1:
            raise GenerationFailed("no finite logits")
        return generate(requests)

    engine: Any = fleet.rollout[0]
    engine.open = calls(fails_in_company)
    assert trained(tmp_path, config, fleet, tries=3) == undisturbed


def test_deaths_between_an_engines_own_failures_do_not_add_to_them(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path
) -> None:
    """Twice in company, then once alone, is not twice alone, however often the engine dies besides."""
    errors = [GenerationFailed("logits"), EngineDied("gone"), GenerationFailed("logits"), EngineDied("gone")]
    errors += [EngineDied("gone"), GenerationFailed("logits"), EngineDied("gone"), EngineTimeout("silent")]
    left = list(errors)
    fleet = LocalFleet(config)
    generate = fleet.rollout[0].generate

    def disturbed(requests: Sequence[GenerateRequest]) -> Generated:
        if left:
            raise left.pop(0)
        return generate(requests)

    engine: Any = fleet.rollout[0]
    engine.open = calls(disturbed)
    assert trained(tmp_path, config, fleet, tries=len(errors) + 1) == undisturbed
