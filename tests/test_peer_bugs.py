"""Bugs that other systems of the field shipped, each as a property that holds here. Issues are on GitHub."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.configs.errors import BadData
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.types.errors import EngineError, EngineTimeout, GenerationFailed
from cairn.engines.types.trajectories import GeneratedSample
from cairn.engines.types.types import Completion, GenerateRequest, TrainBatch
from cairn.flows.driver.sources import Sources
from cairn.flows.driver.validation import data_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import Status
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.storage.store.errors import RunDiffers, StoreError
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import StoredFile
from cairn.storage.upkeep.retention import newest_checkpoint
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection, number, trained_groups
from cairn.tasks.durable.step import DurableStep
from tests.local_fleet import LocalFleet, LocalRollout, calls
from tests.tiny_run import PROMPTS, DirectSteps, tiny_config, tiny_context, train_digests

pytestmark = pytest.mark.proof

ROLLOUT = {"num_rollout": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 12}


def run_to(
    store: Path, config: RunConfig, last: int, fleet: LocalFleet | None = None, steps: type[DirectSteps] = DirectSteps
) -> list[str | None]:
    """A driver of its own does the iterations up to `last` that are not done; returns all state digests."""
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        for index in range(last + 1):
            iteration(run, steps(run), index)
        return train_digests(run, range(last + 1))


def drawn(store: Path) -> list[int]:
    """Positions in the stream of prompts that the run generated, in order."""
    ledger = Ledger.open(open_store(str(store)), "tiny")
    commits = [commit for index in ledger.iterations() for commit in ledger.commits(index)]
    rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
    return sorted({row["group_id"] for commit in rollouts for row in rows(store, commit)})


def rows(store: Path, commit: Commit) -> list[dict[str, Any]]:
    """Of a commit's table."""
    return read_table(open_store(str(store)), commit.run, commit.outputs[0]).to_pylist()


class Engine:
    """A rollout engine whose `generate` is disturbed; all else is the real one's."""

    def __init__(self, engine: LocalRollout, generate: Callable[..., Iterator[list[Completion]]]) -> None:
        self._engine, self._generate = engine, generate

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        return self._generate(self._engine, requests)

    def generate_samples(self, *args: Any) -> Iterator[list[GeneratedSample]]:
        return SampleEngine(calls(self.generate), self._engine.abort).generate(*args)

    keep = LocalRollout.keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def disturbed(config: RunConfig, generate: Callable[..., Iterator[list[Completion]]]) -> LocalFleet:
    fleet = LocalFleet(config)
    fleet.rollout = [Engine(engine, generate) for engine in fleet.rollout]  # type: ignore[misc]
    return fleet


class Dies(KeyboardInterrupt):
    """The driver's end."""


def test_resume_at_an_epoch_boundary_trains_the_next_epoch(tiny_assets: Path, tmp_path: Path) -> None:
    """verl #5725, #7401, #7974: resumed where an epoch ends, the loop found nothing left, trained 0 steps and exited
    with 0."""
    config = tiny_config(tiny_assets, data={"path": f"{tiny_assets / 'train.jsonl'}@[0:8]"}, rollout=ROLLOUT)
    undisturbed = run_to(tmp_path / "whole", config, 3)
    run_to(tmp_path / "resumed", config, 1)  # 2 × 4 prompts: exactly one epoch
    assert run_to(tmp_path / "resumed", config, 3) == undisturbed
    assert len(set(undisturbed)) == 4
    ledger = Ledger.open(open_store(str(tmp_path / "resumed")), "tiny")
    epochs = [{row["epoch"] for row in rows(tmp_path / "resumed", ledger.commits(i)[0])} for i in range(4)]
    assert epochs == [{0}, {0}, {1}, {1}]


def test_the_cursor_is_never_ahead_of_prompts_in_flight(tiny_assets: Path, tmp_path: Path) -> None:
    """NeMo-RL #3594: the saved data position was past prompts still being generated; after a restart nobody trained on
    them."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT | {"shards_per_round": 2})

    def dies_in_the_second_shard(engine: LocalRollout, requests: Sequence[GenerateRequest]) -> Iterator[Any]:
        for completions in engine.generate(requests):
            yield completions[:1]
            if requests[0].request_id[0] == 6:  # the second shard of iteration 1, while the first's cursor is past it
                raise Dies
            yield completions[1:]

    with pytest.raises(Dies):
        run_to(tmp_path, config, 3, disturbed(config, dies_in_the_second_shard))
    run_to(tmp_path, config, 3)
    assert drawn(tmp_path) == list(range(16))


def test_the_buffer_is_not_empty_after_a_restart(tiny_assets: Path, tmp_path: Path) -> None:
    """slime (vime) #324 and TRL's buffered inputs: what had been generated ahead was gone after a restart."""
    (tmp_path / "grader.py").write_text(
        "def grade(response, label, metadata):\n"
        "    if int(label) in (6, 7):\n"
        "        raise RuntimeError('no judge today')\n"
        "    return float(len(response) % 5)\n"
    )
    config = tiny_config(
        tiny_assets,
        data={"path": str(tiny_assets / "train.jsonl"), "rollout_shuffle": False},
        rollout=ROLLOUT | {"over_sampling_batch_size": 6, "max_age": 1},
        reward={"custom_rm_path": f"{tmp_path / 'grader.py'}:grade"},
    )
    undisturbed = run_to(tmp_path / "whole", config, 2)
    run_to(tmp_path / "resumed", config, 0)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path / "resumed"), config, fleet=fleet) as (run, _):
        assert number(last_selection(run, 0), "buffered") == 2
        iteration(run, DirectSteps(run), 0)
        iteration(run, DirectSteps(run), 1)
        assert [group for _, _, group in trained_groups(run, last_selection(run, 1))] == [8, 9, 4, 5]
    assert fleet.rollout[0].generated_groups == 4
    assert run_to(tmp_path / "resumed", config, 2) == undisturbed


def test_completion_order_changes_no_digest(tiny_assets: Path, tmp_path: Path) -> None:
    """unionai-examples #306: rewards gathered as they completed changed the next step's input hash, so that a committed
    step looked new."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT | {"shards_per_round": 2})

    def backwards(engine: LocalRollout, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        for completions in reversed(list(engine.generate(requests))):
            yield completions[::-1]

    class LastSubmittedFirst(DirectSteps):
        """The shard that was submitted first ends last."""

        def __init__(self, run: RunContext) -> None:
            super().__init__(run)
            self._waiting: list[Callable[[], None]] = []

        def submit(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Any:
            if shard is None:  # a checkpoint
                return super().submit(step, index, shard, *args, **kwargs)
            future: Future[Commit] = Future()
            self._waiting.append(lambda: future.set_result(self.call(step, index, shard, *args, **kwargs)))
            return _Lazy(future, self)

        def run_waiting(self) -> None:
            while self._waiting:
                self._waiting.pop()()

    class _Lazy(Future[Commit]):
        def __init__(self, future: "Future[Commit]", steps: LastSubmittedFirst) -> None:
            super().__init__()
            self._future, self._steps = future, steps

        def result(self, timeout: float | None = None) -> Commit:
            self._steps.run_waiting()
            return self._future.result(timeout)

    ordered = run_to(tmp_path / "ordered", config, 1)
    assert run_to(tmp_path / "backwards", config, 1, disturbed(config, backwards), LastSubmittedFirst) == ordered
    contents = [
        [commit.outputs[0].content for commit in ledger.commits(1) if commit.step is Step.ROLLOUT]
        for ledger in (Ledger.open(open_store(str(tmp_path / name)), "tiny") for name in ("ordered", "backwards"))
    ]
    assert contents[0] == contents[1]
    with tiny_context(str(tmp_path / "backwards"), config) as (run, events):
        iteration(run, DirectSteps(run), 1)  # in the usual order now: every step knows its commit again
    assert events.executed() == []


def test_a_surviving_actor_does_not_update_twice(tiny_assets: Path, tmp_path: Path) -> None:
    """unionai-examples #306: the reply to an update was lost, the step was tried again, and the actor that had survived
    applied it a second time."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT)
    undisturbed = run_to(tmp_path / "undisturbed", config, 1)
    fleet = LocalFleet(config)
    update = fleet.training.train

    def loses_the_reply(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        fleet.training.train = update  # type: ignore[method-assign]
        raise EngineTimeout("the reply did not come")

    fleet.training.train = loses_the_reply  # type: ignore[method-assign]
    with pytest.raises(EngineTimeout):
        run_to(tmp_path / "lost", config, 1, fleet)
    assert run_to(tmp_path / "lost", config, 1, fleet) == undisturbed
    assert fleet.training.updates == 2


def test_an_exception_is_no_zero_reward(tiny_assets: Path, tmp_path: Path) -> None:
    """NeMo-RL #3470, #3589: rollouts that ended in an exception were committed as rows with reward 0."""
    grader = tmp_path / "fails.py"
    grader.write_text(
        "def grade(response, label, metadata):\n"
        "    if int(label) % 4 == 1:\n"
        "        raise ConnectionError('no judge')\n"
        "    return 1.0 + len(response) % 5  # never 0\n"
    )
    retry = {"grader": {"retry_delay_seconds": 0}}
    config = tiny_config(tiny_assets, rollout=ROLLOUT, reward={"custom_rm_path": f"{grader}:grade"}, retry=retry)
    with tiny_context(str(tmp_path), config) as (run, _):
        failed = 0
        for index in range(2):
            commits = iteration(run, DirectSteps(run), index)
            graded = [row for commit in commits if commit.step is Step.REWARD for row in run.read(commit).to_pylist()]
            errors = [row for row in graded if row["error"]]
            assert all(row["reward"] is None and row["status"] == Status.FAILED for row in errors)
            assert sum(c.metrics["failed_samples"] for c in commits if c.step is Step.REWARD) == len(errors)
            (trained,) = [commit for commit in commits if commit.step is Step.ADVANTAGE]
            assert min(row["reward"] for row in run.read(trained).to_pylist()) >= 1
            failed += len(errors)
        assert failed > 0


def test_an_empty_response_is_not_trained_as_padding(tiny_assets: Path) -> None:
    """agentcore-rl-toolkit #122, verl #6310: a rollout without a token became one pad token with a loss mask of 1."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT, algorithm={"use_rollout_logprobs": False})

    def trained(lengths: Sequence[int], masked: int) -> tuple[str, int]:
        draw = np.random.default_rng(0)
        batch = TrainBatch(
            input_ids=[draw.integers(3, 20, size=5 + max(lengths)).astype(np.int32)[: 5 + n] for n in lengths],
            response_lengths=list(lengths),
            loss_mask=[np.full(n, i != masked, np.uint8) for i, n in enumerate(lengths)],
            advantages=[np.full(n, 0.5 - i, np.float32) for i, n in enumerate(lengths)],
        )
        result = LocalFleet(config).training.train(batch, num_steps=1, expected_version=0, input_digest="input")
        return result.state_digest, result.tokens

    empty, tokens = trained([4, 6, 0, 3], masked=-1)
    unmasked, _ = trained([4, 6, 2, 3], masked=2)
    assert empty == unmasked != trained([4, 6, 2, 3], masked=-1)[0]
    assert tokens == 4 * 5 + 4 + 6 + 0 + 3


def test_an_engine_that_gives_fewer_samples_than_asked_is_found_out(tiny_assets: Path, tmp_path: Path) -> None:
    """NeMo-RL #2700: a group that never got its last sample could neither be trained on nor given up, and the trainer
    waited for ever."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT)
    undisturbed = run_to(tmp_path / "undisturbed", config, 0)
    calls = 0

    def loses_one_at_first(engine: LocalRollout, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        nonlocal calls
        calls += 1
        for completions in engine.generate(requests):
            yield [c for c in completions if calls > 1 or c.request_id[:2] != (2, 3)]

    fleet = disturbed(config, loses_one_at_first)
    with pytest.raises(EngineError, match="returned fewer samples than requested: requests 2/3/0 have none"):
        run_to(tmp_path / "lossy", config, 0, fleet)
    assert Ledger.open(open_store(str(tmp_path / "lossy")), "tiny").commits(0) == []
    assert run_to(tmp_path / "lossy", config, 0, fleet) == undisturbed


POISON = len(PROMPTS)
"""Row of the data set that is poison, as its label says."""


@pytest.fixture
def poisoned(tiny_assets: Path, tmp_path: Path) -> Path:
    """A data set of four prompts, the second of which is bad."""
    lines = [{"prompt": prompt, "label": str(index)} for index, prompt in enumerate(PROMPTS[:4])]
    lines[1] = {"prompt": "Sort the digits 9 9 9 9 in increasing order.", "label": str(POISON)}
    (tmp_path / "poisoned.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "poisoned.jsonl"


def poisoned_config(assets: Path, data: Path, **reward: Any) -> RunConfig:
    return tiny_config(
        assets,
        data={"path": str(data), "rollout_shuffle": False},
        rollout=ROLLOUT | {"num_rollout": 2, "rollout_batch_size": 3},
        **({"reward": reward} if reward else {}),
    )


def reward_of(row: dict[str, Any]) -> float | None:
    """What the tiny run's grader says of a sample."""
    response = row["response_text"]
    return None if row["error"] else np.float32(sum(ord(char) % 3 for char in response) / (3 * len(response) + 1))


def refuses(engine: LocalRollout, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
    """A tokenizer that knows more tokens than the model: the engine refuses the prompt for what it holds."""
    spoilt = [replace(r, input_ids=(10**6,)) if r.request_id[0] % 4 == 1 else r for r in requests]
    return engine.generate(spoilt)


def fails(engine: LocalRollout, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
    """The engine lives, and fails on the prompt."""
    for completions in engine.generate(requests):
        if any(completion.request_id[0] % 4 == 1 for completion in completions):
            raise GenerationFailed("no finite logits")
        yield completions


@pytest.mark.parametrize(
    ("generate", "tries", "error"), [(refuses, 1, "outside the model's"), (fails, 4, "no finite logits")]
)
def test_a_poison_prompt_fails_alone(
    tiny_assets: Path, tmp_path: Path, poisoned: Path, generate: Any, tries: int, error: str
) -> None:
    """NeMo-RL #3238: after every resume the same prompt was drawn and stopped the run again."""
    config = poisoned_config(tiny_assets, poisoned)
    fleet = disturbed(config, generate)
    store = tmp_path / "store"
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        for index in range(2):
            for _ in range(tries - 1):  # as many as the default retry.retries allows
                with pytest.raises(GenerationFailed):
                    iteration(run, DirectSteps(run), index)
            commits = iteration(run, DirectSteps(run), index)
            samples = [row for c in commits if c.step is Step.ROLLOUT for row in run.read(c).to_pylist()]
            failed = [row for row in samples if row["status"] == Status.FAILED]
            assert {row["label"] for row in failed} == {str(POISON)}
            assert all(error in row["error"] and row["response_ids"] == [] for row in failed)
            assert sum(c.metrics["failed_samples"] for c in commits if c.step is Step.REWARD) == len(failed) > 0
            graded = [row for c in commits if c.step is Step.REWARD for row in run.read(c).to_pylist()]
            assert [row["reward"] for row in graded] == [reward_of(row) for row in samples]
            trained = {group for _, _, group in trained_groups(run, last_selection(run, index))}
            assert len(trained) == 3
            assert trained.isdisjoint(row["group_id"] for row in failed)


def test_a_row_without_a_prompt_is_passed_over(tiny_assets: Path, tmp_path: Path, poisoned: Path) -> None:
    """NeMo-RL #3238, as above: here not even a prompt can be made, of a row that can no longer be corrected."""
    lines = poisoned.read_text().splitlines()
    poisoned.write_text("\n".join([lines[0], json.dumps({"prompt": "", "label": "0"}), *lines[2:]]))
    config = poisoned_config(tiny_assets, poisoned)
    config = config.model_copy(update={"data": config.data.model_copy(update={"apply_chat_template": False})})
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        commits = iteration(run, DirectSteps(run), 0)
        assert [group for _, _, group in trained_groups(run, last_selection(run, 0))] == [0, 2, 3]
    assert sum(c.metrics["passed_over_prompts"] for c in commits if c.step is Step.ROLLOUT) == 1


def test_a_benchmark_with_a_row_without_a_prompt_is_refused_at_the_start(tiny_assets: Path, poisoned: Path) -> None:
    """NeMo-RL #3238, as above: no row of a benchmark can be passed over, so the run does not even begin."""
    poisoned.write_text(json.dumps({"prompt": "fine", "label": "0"}) + "\n" + json.dumps({"prompt": "", "label": "0"}))
    benchmark = {"name": "b", "path": str(poisoned), "apply_chat_template": False, "max_response_len": 4}
    config = tiny_config(tiny_assets, eval={"eval_interval": 1, "benchmarks": [benchmark]})
    with pytest.raises(BadData, match="row 2 has an empty prompt: give it some text or remove the row"):
        Sources.open(config)
    assert any("row 2 has an empty prompt" in problem for problem in data_problems(config))


def test_a_torn_upload_is_no_checkpoint(tiny_assets: Path, tmp_path: Path) -> None:
    """prime-rl #1712, marin #9209: a checkpoint whose upload had not ended was there to be loaded."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT, checkpoint={"save_interval": 1})
    undisturbed = run_to(tmp_path / "whole", config, 2)
    fleet = LocalFleet(config)
    write = fleet.training.write_copy

    def torn(store_url: str, folder: str) -> list[StoredFile]:
        written = write(store_url, folder)
        last = tmp_path / "torn" / written[-2].path
        last.write_bytes(last.read_bytes()[:1000])
        raise Dies

    with tiny_context(str(tmp_path / "torn"), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        fleet.training.write_copy = torn  # type: ignore[method-assign]
        with pytest.raises(Dies):
            iteration(run, DirectSteps(run), 1)
    with tiny_context(str(tmp_path / "torn"), config) as (run, _):
        saved = newest_checkpoint(run.ledger, 1)
        assert saved is not None
        assert saved.iteration == 0
        assert not [finding for verified in verify(run.ledger) for finding in verified.findings]
    assert run_to(tmp_path / "torn", config, 2) == undisturbed


def test_one_failed_writer_among_several_holds_nobody_up(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """marin #9213: one rank's upload failed, and the others waited at a barrier for ever. Here the shards of a rollout;
    the ranks that write a checkpoint are held to it in tests/engines/training/megatron/test_checkpoint.py."""
    config = tiny_config(tiny_assets, rollout=ROLLOUT | {"num_engines": 2})
    undisturbed = run_to(tmp_path / "whole", config, 1)

    class InThreads(DirectSteps):
        def submit(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Any:
            return pool.submit(self.call, step, index, shard, *args, **kwargs)

    with tiny_context(str(tmp_path / "one"), config) as (run, _), ThreadPoolExecutor(4) as pool:
        write = LocalStore.write

        def fails_for_one(store: LocalStore, path: str, data: bytes) -> None:
            if path.endswith("samples.parquet") and "/rollout/00-001." in path:
                raise StoreError("the store does not answer")
            write(store, path, data)

        monkeypatch.setattr(LocalStore, "write", fails_for_one)
        began = time.monotonic()
        with pytest.raises(StoreError, match="does not answer"):
            iteration(run, InThreads(run), 0)
        assert time.monotonic() - began < 60
        assert {commit.name for commit in run.ledger.commits(0)} <= {
            "000000/rollout.00-000",
            "000000/reward.00-000",
        }
    monkeypatch.undo()
    fleet = LocalFleet(config)
    assert run_to(tmp_path / "one", config, 1, fleet) == undisturbed
    assert [engine.generated_groups for engine in fleet.rollout] == [2, 2]  # of iteration 1: all others were durable


def test_a_data_set_that_was_swapped_is_noticed(tiny_assets: Path, tmp_path: Path) -> None:
    """TRL #3635, OpenRLHF #1103: a resumed run went on with whatever lay under the data's path."""
    data = tmp_path / "train.jsonl"
    lines = (tiny_assets / "train.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines))
    config = tiny_config(tiny_assets, data={"path": str(data)}, rollout=ROLLOUT)
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        data.write_text("".join(reversed(lines)) + "\n")
        with pytest.raises(BadData, match="was changed while it was in use"):
            iteration(run, DirectSteps(run), 1)
    with pytest.raises(RunDiffers, match="digest of data"), tiny_context(str(tmp_path / "store"), config):
        pass
