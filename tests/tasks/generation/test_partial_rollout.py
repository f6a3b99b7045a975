"""Partial rollout: what over-sampling left unfinished is durable, and is continued with the tokens that it has."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import Completion, GenerateRequest, Stream
from cairn.flows.iteration import iteration
from cairn.flows.reading.samples import iteration_samples
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.schemas import Disposition
from cairn.storage.upkeep.verification import verify
from cairn.tasks.batch.batch import rows_of_groups, trained_shards
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection, number, trained_groups, unfinished_groups
from cairn.tasks.generation.calls import read_calls
from cairn.tasks.generation.groups import row_segments, sample_seed
from cairn.tasks.trainer.recovery import restore_trainer
from tests.local_fleet import LocalFleet, LocalRollout, calls
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

BATCH, DRAWN, SAMPLES, LENGTH = 4, 9, 4, 60
PARTIAL = {
    "num_rollout": 4,
    "rollout_batch_size": BATCH,
    "over_sampling_batch_size": DRAWN,
    "n_samples_per_prompt": SAMPLES,
    "rollout_max_response_len": LENGTH,
    "rollout_stop_token_ids": tuple(range(3, 12)),  # so that responses end at different times
    "max_running_requests": 10,
    "partial_rollout": True,
    "max_age": 1,
}


def partial_config(assets: Path, **options: object) -> RunConfig:
    return tiny_config(assets, rollout=PARTIAL | options)


@dataclass
class Row:
    """A sample in the order in which shards were committed."""

    commit: Commit
    columns: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    @property
    def key(self) -> tuple[int, int]:
        return self["group_id"], self["sample_index"]


def sampled(run: RunContext, iterations: int) -> list[Row]:
    commits = [commit for index in range(iterations) for commit in run.ledger.commits(index)]
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    return [Row(commit, row) for commit in rollouts for row in run.read(commit).to_pylist()]


Generate = Callable[[Sequence[GenerateRequest]], Iterator[list[Completion]]]


def fleet_with(config: RunConfig, changed: Callable[[LocalRollout, Generate], Generate]) -> LocalFleet:
    """Its first engine generates in another way, which is made of the engine and its own."""
    fleet = LocalFleet(config)
    engine: Any = fleet.rollout[0]
    engine.open = calls(changed(engine, engine.generate))
    return fleet


def run_iterations(run: RunContext, count: int) -> None:
    for index in range(count):
        iteration(run, DirectSteps(run), index)


def hf_log_probs(model: torch.nn.Module, row: Row) -> np.ndarray:
    """[T] of the whole response, from one forward pass of the library without a cache."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_unfinished_groups_are_continued_first_with_their_tokens_under_the_next_weights(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = partial_config(tiny_assets)
    fleet = LocalFleet(config)
    models = {}
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
            model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
            model.load_state_dict(fleet.rollout[0].engine._model.state_dict())
            models[index] = model  # what it was given to sample this iteration with
        earlier: dict[tuple[int, int], Row] = {}
        ways: Counter[str] = Counter()
        for row in sampled(run, 3):
            part = earlier.get(row.key)
            versions = np.asarray(row["weight_versions"])
            assert len(row["response_ids"]) == len(row["log_probs"]) == len(versions) == len(row["loss_mask"])
            assert all(row["loss_mask"])
            if part is None:
                assert row["seed"] == sample_seed(config.seed, row.commit.iteration, *row.key)
                assert (versions == row.commit.weight_version_in).all()
                ways["fresh"] += 1
            else:
                carried = len(part["response_ids"])
                for name in ("response_ids", "log_probs", "weight_versions"):
                    assert row[name][:carried] == part[name]
                assert all(row[name] == part[name] for name in ("seed", "rollout_id", "prompt_ids", "label", "epoch"))
                if part["status"] != "aborted":
                    assert len(row["response_ids"]) == carried
                    assert row["status"] == part["status"]
                    ways["had finished"] += 1
                else:
                    assert (versions[carried:] == row.commit.weight_version_in).all()
                    ways["continued" if carried else "begun"] += 1
            assert len(row["response_ids"]) <= LENGTH
            for version in set(versions.tolist()):
                expected = hf_log_probs(models[version], row)
                found = np.asarray(row["log_probs"])
                assert np.abs(found - expected)[versions == version].max() < 1e-4
            earlier[row.key] = row
        assert min(ways[way] for way in ("fresh", "had finished", "continued", "begun")) > 0, ways
        assert any(len(set(row["weight_versions"])) > 1 for row in earlier.values() if row["status"] != "aborted")

        for index in (1, 2):
            waiting = [group for _, _, group in unfinished_groups(run, last_selection(run, index - 1))]
            first = run.committed(index, Step.ROLLOUT, "00-000")
            assert waiting
            assert first.metrics["continued_groups"] == len(waiting)
            groups = {row["group_id"] for row in run.read(first).to_pylist()}
            assert groups > set(waiting), "and then fresh ones"
            assert min(groups - set(waiting)) == number(last_selection(run, index - 1), "cursor")
            assert first.values["batch_invariant"] is False


def test_every_group_that_was_drawn_has_one_end(tiny_assets: Path, tmp_path: Path) -> None:
    """Trained on, dropped, in the buffer or waiting to be continued: once each, and none is lost."""
    config = partial_config(tiny_assets, dynamic_sampling_filter="check_reward_nonzero_std", num_engines=2, max_age=3)
    with tiny_context(str(tmp_path), config) as (run, _):
        run_iterations(run, 4)
        ends: Counter[int] = Counter()
        for index in range(4):
            rows = run.read(last_selection(run, index)).to_pylist()
            assert len({row["group_id"] for row in rows}) == len(rows)
            ages = [row["age"] for row in rows if row["disposition"] == Disposition.TRAIN]
            assert ages == sorted(ages), "what was finished last is trained on first"
            assert ages == [index - row["iteration"] for row in rows if row["disposition"] == Disposition.TRAIN]
            assert sum(row["disposition"] == Disposition.TRAIN for row in rows) == BATCH
            final = (Disposition.TRAIN, Disposition.DROP) if index < 3 else tuple(Disposition)
            ends.update(row["group_id"] for row in rows if row["disposition"] in final)
        assert sorted(ends) == list(range(number(last_selection(run, 3), "cursor")))
        assert set(ends.values()) == {1}
        *_, last = checks = list(verify(run.ledger))
        assert [finding for one in checks for finding in one.findings] == []
        assert last.groups is not None
        assert last.groups.trained == 4 * BATCH
        assert last.groups.trained + sum(last.groups.dropped.values()) + last.groups.open == len(ends)
        for _, shard, group in trained_groups(run, last_selection(run, 1)):
            graded = run.read(run.committed(1, Step.REWARD, shard)).to_pylist()
            assert all(row["reward"] is not None for row in graded if row["group_id"] == group)
        views = iteration_samples(run.ledger, 1)
        assert len({(view.group_id, view.sample_index) for view in views}) == len(views)


def test_a_later_round_continues_what_an_earlier_one_of_its_iteration_left(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tiny_assets / "rarely.py"
    grader.write_text(
        "def grade(response, label, metadata):\n    return len(response) % 7 if int(label) % 3 == 0 else 1.0\n"
    )
    config = tiny_config(
        tiny_assets,
        rollout=PARTIAL | {"dynamic_sampling_filter": "check_reward_nonzero_std"},
        reward={"custom_rm_path": f"{grader}:grade"},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        run_iterations(run, 1)
        left = unfinished_groups(run, run.committed(0, Step.FILTER, "00"))
        second = run.committed(0, Step.ROLLOUT, "01-000")
        assert left
        assert second.metrics["continued_groups"] > 0
        rows = run.read(second).to_pylist()
        assert {row["group_id"] for row in rows} >= {
            group for _, _, group in left[: int(second.metrics["continued_groups"])]
        }
        selected = run.read(last_selection(run, 0)).to_pylist()
        assert len({row["group_id"] for row in selected}) == len(selected)


def test_unfinished_groups_wait_while_the_buffer_fills_the_batch(tiny_assets: Path, tmp_path: Path) -> None:
    config = partial_config(tiny_assets, rollout_batch_size=2, num_engines=2, max_age=2)
    fleet = LocalFleet(config)
    slow: Any = fleet.rollout[1]  # of the groups that it draws, others come first
    slow.abort = lambda: None  # it has finished everything before it hears of it
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        run_iterations(run, 3)
        waiting = unfinished_groups(run, last_selection(run, 0))
        assert waiting
        assert {commit.step for commit in run.ledger.commits(1)} == {
            Step.FILTER, Step.ADVANTAGE, Step.TRAIN, Step.SYNC
        }  # fmt: skip
        assert unfinished_groups(run, last_selection(run, 2)) == waiting
        slow.abort = slow.engine.abort
        run_iterations(run, 4)
        rollouts = [commit for commit in run.ledger.commits(3) if commit.step is Step.ROLLOUT]
        assert sum(commit.metrics["continued_groups"] for commit in rollouts) == len(waiting)
        assert "000000/rollout.00-000" in {name for commit in rollouts for name in commit.inputs}


@pytest.mark.parametrize(
    ("options", "oldest"),
    [
        ({}, 1),
        ({"mask_offpolicy_in_partial_rollout": True}, 0),  # nothing waits in this buffer: all are finished
    ],
)
def test_tokens_of_older_weights_are_left_out_of_the_loss_unless_they_are_young_enough(
    tiny_assets: Path, tmp_path: Path, options: dict[str, Any], oldest: int
) -> None:
    config = partial_config(tiny_assets, **options)
    with tiny_context(str(tmp_path), config) as (run, _):
        run_iterations(run, 3)
        masked = older = 0
        for index in range(3):
            selection = last_selection(run, index)
            rollouts, _ = trained_shards(run, selection)
            samples = pa.concat_tables(rows_of_groups(run, selection, rollouts, ["weight_versions", "loss_mask"]))
            estimated = run.committed(index, Step.ADVANTAGE)
            # One optimizer step an iteration: iteration i samples from version i.
            ages = [index - np.asarray(versions) for versions in samples.column("weight_versions").to_pylist()]
            assert [age.tolist() for age in ages] == run.read(estimated).column("ages").to_pylist()
            batch = train_batch(run, selection, rollouts)
            flat, mask = np.concatenate(ages), np.concatenate(batch.loss_mask)
            counted = mask if batch.divisor_mask is None else np.concatenate(batch.divisor_mask)
            assert counted.all(), "what is masked stays in what the loss is divided by"
            finished = {group: index - iteration for iteration, _, group in trained_groups(run, selection)}
            newest = np.repeat([finished[group] for group in samples.column("group_id").to_pylist()], [*map(len, ages)])
            allowed = flat <= (np.maximum(oldest, newest) if "mask_offpolicy_in_partial_rollout" in options else oldest)
            assert mask.tolist() == allowed.astype(int).tolist()
            assert all(map(all, samples.column("loss_mask").to_pylist())), "the rollout decides nothing"
            assert estimated.metrics["age/max"] == flat[allowed].max()
            assert estimated.metrics["age/mean"] == pytest.approx(flat[allowed].mean())
            assert estimated.metrics["age/masked_tokens"] == (~allowed).sum()
            masked += (~allowed).sum()
            older += (flat > 0).sum()
        assert older > 0, "the witness that something was continued"
        assert (masked > 0) == (oldest == 0)


class Dies(KeyboardInterrupt):
    """The driver's end."""


def dies_after(groups: int) -> Callable[[LocalRollout, Generate], Generate]:
    """The driver is gone as soon as so many groups have finished."""

    def dies(_: LocalRollout, generate: Generate) -> Generate:
        def generate_until_the_end(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
            left = Counter(request.request_id[0] for request in requests)
            requested = len(left)
            for completions in generate(requests):
                yield completions
                left -= Counter(completion.request_id[0] for completion in completions)
                if len(left) <= requested - groups:
                    raise Dies

        return generate_until_the_end

    return dies


def test_a_killed_driver_is_succeeded_and_what_is_committed_replays_bit_for_bit(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = partial_config(tiny_assets)
    with tiny_context(str(tmp_path), config) as (run, _):
        run_iterations(run, 1)
        waiting = {group for _, _, group in unfinished_groups(run, last_selection(run, 0))}
    dying = fleet_with(config, dies_after(1))
    with tiny_context(str(tmp_path), config, fleet=dying) as (run, _), pytest.raises(Dies):
        run_iterations(run, 2)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        run_iterations(run, 2)
        resumed = run.committed(1, Step.ROLLOUT, "00-000")
        recovered = int(resumed.metrics["recovered_groups"])
        assert recovered > 0
        groups = {row["group_id"] for row in run.read(resumed).to_pylist()}
        assert groups > waiting
        assert 0 < fleet.rollout[0].generated_groups <= len(groups) - recovered
        usable = {row["group_id"] for row in run.read(last_selection(run, 1)).to_pylist() if row["kept"]}
        assert len(usable) >= BATCH
        run_iterations(run, 4)
        digests = train_digests(run, range(4))
    with tiny_context(str(tmp_path), config, fleet=LocalFleet(config)) as (run, events):
        run_iterations(run, 4)
        restore_trainer(run, run.committed(3, Step.TRAIN))  # raises where a digest differs
        assert train_digests(run, range(4)) == digests
        assert events.executed() == []
        assert [finding for one in verify(run.ledger) for finding in one.findings] == []


def test_a_shard_whose_share_was_done_before_the_kill_generates_nothing(tiny_assets: Path, tmp_path: Path) -> None:
    config = partial_config(tiny_assets)
    with tiny_context(str(tmp_path), config) as (run, _):
        run.commit = _dies  # type: ignore[method-assign]
        with pytest.raises(Dies):
            run_iterations(run, 1)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        run_iterations(run, 1)
        assert fleet.rollout[0].generated_groups == 0
        assert run.committed(0, Step.ROLLOUT, "00-000").metrics["recovered_groups"] >= BATCH
        assert number(last_selection(run, 0), "unfinished") > 0
        run_iterations(run, 2)


def _dies(**fields: object) -> Commit:
    raise Dies


def refuses_two(_: LocalRollout, generate: Generate) -> Generate:
    def without_prompt(request: GenerateRequest) -> GenerateRequest:
        return replace(request, input_ids=[], position=0)

    return lambda requests: generate([r if r.request_id[0] > 1 else without_prompt(r) for r in requests])


@pytest.mark.parametrize("killed", [False, True])
def test_groups_that_failed_are_no_part_of_the_share(tiny_assets: Path, tmp_path: Path, killed: bool) -> None:
    config = partial_config(tiny_assets)
    if killed:
        dying = fleet_with(config, lambda engine, generate: refuses_two(engine, dies_after(1)(engine, generate)))
        with tiny_context(str(tmp_path), config, fleet=dying) as (run, _), pytest.raises(Dies):
            run_iterations(run, 1)
    with tiny_context(str(tmp_path), config, fleet=fleet_with(config, refuses_two)) as (run, _):
        run_iterations(run, 1)
        selection = last_selection(run, 0)
        assert selection.shard == "00"
        assert (run.committed(0, Step.ROLLOUT, "00-000").metrics["recovered_groups"] > 2) == killed
        reasons = {row["group_id"]: row["reason"] for row in run.read(selection).to_pylist()}
        assert {group for group, reason in reasons.items() if reason == "failed_sample"} == {0, 1}


class OtherWeights(LocalRollout):
    """An engine that was restarted with other weights behind the driver's back."""

    def open(self) -> Stream:
        self.engine.begin_weight_update(7)
        self.engine.update_weights_from_disk(Path(self.engine.health()["model"]))
        self.engine.end_weight_update()
        return super().open()


def test_samples_of_other_weights_never_reach_a_commit(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    fleet = LocalFleet(config)
    fleet.rollout = [OtherWeights(config, 0)]
    with (
        tiny_context(str(tmp_path), config, fleet=fleet) as (run, _),
        pytest.raises(EngineError, match="rollout:0 sampled with the weights of version 7, not 0"),
    ):
        run_iterations(run, 1)
    assert run.ledger.commits(0) == []


def aborts_itself(engine: LocalRollout, generate: Generate) -> Generate:
    def generate_and_abort(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        stream = generate(requests)
        engine.engine.abort()
        return stream

    return generate_and_abort


def test_a_sample_that_nobody_aborted_is_not_taken_for_a_part(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    with (
        tiny_context(str(tmp_path), config, fleet=fleet_with(config, aborts_itself)) as (run, _),
        pytest.raises(EngineError, match="aborted a sample of group 0 without a request"),
    ):
        run_iterations(run, 1)


EPISODE = """
import asyncio

import cairn


@cairn.tool(kind="pure")
async def look(word: str) -> str:
    return word


async def generate(ctx, sample):
    ids, segments = [*sample.prompt_ids], []
    for turn in range(1 if sample.group_id < 4 else 8):  # so that what is needed has ended when the others have begun
        segments.append(await ctx.sample(ids, max_new_tokens=12))
        world = cairn.Segment.given(ctx.tokenizer.encode(await ctx.call(look, {"word": str(turn)})))
        segments.append(world)
        ids += [*segments[-2].ids, *world.ids]
    return cairn.Trajectory(segments)
"""


@pytest.mark.proof
def test_an_episode_that_is_continued_has_the_turns_that_it_had(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "episode.py").write_text(EPISODE)
    config = partial_config(tiny_assets, custom_generate_function_path=f"{tmp_path / 'episode.py'}:generate")
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        run_iterations(run, 2)
        turns: dict[tuple[int, int], dict[str, list[int]]] = {}
        went_on = 0
        for row in sampled(run, 2):
            found = run.calls(row.commit)
            assert found is not None
            segments = {row.key: row_segments(row.columns)}
            own = {
                one.call: one.segment.ids.tolist()
                for one in read_calls(*found, segments)
                if one.key == row.key and one.segment is not None
            }
            earlier = turns.setdefault(row.key, own)
            assert {call: own[call] for call in earlier} == earlier, "a turn was sampled again"
            went_on += bool(earlier) and len(own) > len(earlier)
            turns[row.key] = own
        assert went_on
