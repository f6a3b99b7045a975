"""State that every step of a live run shares: configuration, ledger, data, grader and fleet."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, Step, parse_commit_name
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import Disposition
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.tasks.data.demonstrations import DemonstrationData
from cairn.tasks.data.drawing import learns_from_results, next_prompts
from cairn.tasks.data.opening import Data
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.stream import Draw, GroupResult
from cairn.tasks.durable.casualties import Casualties
from cairn.tasks.durable.events import StepEvent
from cairn.tasks.durable.recorded_run import TABLE_CACHE_BYTES, RecordedRun
from cairn.tasks.durable.retries import RetryTally
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.durable.unfinished import Unfinished
from cairn.tasks.rewards.grader import Grading, share_of_right

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet


# Results of the groups that a filter step judged in its own round, with their prompts.


def unreported_results(run: "RunContext", selection: Commit) -> tuple[GroupResult, ...]:
    """Return the results of all prompts that were judged since the last draw of prompts.

    These are the results of this round. Where it generated nothing since the batch was filled from the buffer, the
    results of the rounds before it are included.
    """
    results = round_results(run, selection)
    while run.find(selection.iteration, Step.ROLLOUT, f"{selection.shard}-000") is None and selection.iteration:
        selection = last_selection(run, selection.iteration - 1)
        results = round_results(run, selection) + results
    return results


def round_results(run: "RunContext", selection: Commit) -> tuple[GroupResult, ...]:
    """Return the results of a round, sorted by group id. Each group is reported once: by the filter step of the round
    that finished it."""
    rows = {
        row["group_id"]: row
        for row in run.read(selection).to_pylist()
        if row["iteration"] == selection.iteration
        and row["shard"].startswith(f"{selection.shard}-")
        and row["disposition"] != Disposition.CONTINUE
    }
    results: dict[int, GroupResult] = {}
    for shard in sorted({row["shard"] for row in rows.values()}):
        rollout = run.committed(selection.iteration, Step.ROLLOUT, shard)
        columns = run.read(rollout, ["group_id", "prompt_index", "label", "metadata"]).to_pylist()
        graders = run.read(run.committed(selection.iteration, Step.REWARD, shard), ["grader"]).column("grader")
        for prompt, grader in zip(columns, graders.to_pylist(), strict=True):
            row = rows.get(prompt["group_id"])
            if row is not None and row["shard"] == shard and row["group_id"] not in results:
                results[row["group_id"]] = GroupResult(
                    row["group_id"],
                    prompt["prompt_index"],
                    prompt["label"],
                    from_json(prompt["metadata"] or "{}"),
                    row["mean_reward"],
                    row["std_reward"],
                    row["kept"],
                    row["reason"],
                    None if row["mean_reward"] is None else share_of_right(row["mean_reward"], grader),
                )
    return tuple(results[group_id] for group_id in sorted(results))


# Which samples a shard's engine gets first: those of the prompts whose responses were the longest before.
#
# An engine decodes a limited number of samples at a time, and the others wait. If a long sample begins last, all wait
# for it. From the second epoch on the lengths of a prompt's responses are known, and the longest begin first (the LPT
# rule of Graham, Bounds on multiprocessing timing anomalies, 1969). An unknown prompt goes before the known ones: it
# may be the longest, and would cost the most if it began last. Where the engine is batch-invariant, the order changes
# no sample. Elsewhere the order is one more part of the batch composition, which affects samples anyway.
#
# The lengths are in the driver's memory, from the rollouts that it made itself. Nothing is read for them.


class ResponseLengths:
    """Mean response length of each prompt in tokens, over its samples in the newest epoch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs = np.empty(0, np.int32)
        """Newest epoch of each row of the data; -1: none. Arrays, because there may be millions of rows."""
        self._means = np.empty(0, np.float64)
        """Mean tokens in that epoch."""

    def add(self, means: pa.Table) -> None:
        """Add the lengths of the samples of a shard, as `mean_lengths` returns them."""
        with self._lock:
            for row in means.sort_by("epoch").to_pylist():
                prompt = row["prompt_index"]
                if prompt >= len(self._epochs):
                    more = 2 * prompt + 1 - len(self._epochs)
                    self._epochs = np.pad(self._epochs, (0, more), constant_values=-1)
                    self._means = np.pad(self._means, (0, more))
                if row["epoch"] >= self._epochs[prompt]:
                    self._epochs[prompt], self._means[prompt] = row["epoch"], row["tokens_mean"]

    def means(self, prompts: Mapping[int, int]) -> dict[int, float]:
        """Return the means of groups whose prompts have one. `prompts` maps the id of a group to its row in the
        data."""
        with self._lock:
            rows = len(self._epochs)
            seen = ((id, row) for id, row in prompts.items() if row < rows and self._epochs[row] >= 0)
            return {id: float(self._means[row]) for id, row in seen}


# Committed train steps that a driver replays to restore the trainer, until a commit records them.
#
# A restore may come before any step (for the publications that open halves need) or within one. So the driver's next
# commit, of whatever step, records what was replayed since the commit before.


@dataclass(frozen=True)
class Replayed:
    """Number of replayed train steps and their duration in seconds."""

    steps: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics for a commit; empty without replays."""
        return {"recovery/replayed_steps": self.steps} if self.steps else {}

    def timings(self) -> dict[str, float]:
        """Return the timings for a commit, in seconds; empty without replays."""
        return {"replay": self.seconds} if self.steps else {}


class ReplayTally:
    """Replays that no commit has recorded yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replayed = Replayed()

    def add(self, seconds: float) -> None:
        """Count one replayed step that took `seconds`."""
        with self._lock:
            self._replayed = Replayed(self._replayed.steps + 1, self._replayed.seconds + seconds)

    def take(self) -> Replayed:
        """Return what was replayed since the last call, and reset the tally."""
        with self._lock:
            replayed, self._replayed = self._replayed, Replayed()
            return replayed


Service = TypeVar("Service")


class RunContext(RecordedRun):
    """A live run in its driver's process. Thread-safe: shards of a step run at the same time.

    A plain class on purpose: Prefect inspects dataclasses and models that are passed to tasks.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        *,
        fleet: "Callable[[], Fleet]",
        tokenizer: Any,
        data: Data,
        max_prompt_len: int,
        benchmarks: dict[str, PromptData],
        graders: dict[str | None, Grading],
        environment: Environment,
        emit: Callable[[StepEvent], None],
        trusted: Callable[[RunConfig], RunConfig] = lambda recorded: recorded,
        cache_bytes: int = TABLE_CACHE_BYTES,
    ) -> None:
        """Create the context.

        Args:
            fleet: returns the engines once they are up.
            max_prompt_len: in tokens.
            graders: maps the name of a benchmark to its grader, None to the grader of the training samples.
            trusted: returns a recorded configuration with code that may be imported, or raises ConfigError. By default
                none may.
            cache_bytes: see `RecordedRun`.
        """
        super().__init__(config, ledger, cache_bytes)
        self.whole_config, self._trusted = config, trusted
        """The whole configuration, of which `config` may be a view."""
        self.tokenizer = tokenizer
        self.data = data
        self.max_prompt_len = max_prompt_len
        self.emit = emit
        self.environment = environment
        self.weights_lock = threading.RLock()
        """Held while the training engine moves to a state, works from it, or publishes its weights."""
        self.stopping = threading.Event()
        """Set when the driver ends early: no step may begin or be retried."""
        self.suspects_lock = threading.Lock()
        """Held while a group that may end its engine is generated alone."""
        self._attached: dict[type, object] = {}
        self.side_by_side = False
        """Whether one thread learns while another collects."""
        self.failed_generations: Counter[tuple[str, int]] = Counter()
        """Number of times that an engine itself failed on a group, by step and request: see
        `cairn.tasks.generation.generation`."""
        self.casualties = Casualties()
        """Unfinished groups of engines that were lost."""
        self.response_lengths = ResponseLengths()
        """Response lengths of the rollouts that this driver made."""
        self.retries = RetryTally(config.retry)
        """Retries of steps."""
        self.replays = ReplayTally()
        """Replays of train steps."""
        self.unfinished = Unfinished()
        """Steps that iterations do not wait for."""
        self._fleet = fleet
        self.benchmarks = benchmarks
        """Prompts of each benchmark, by its name."""
        self.graders = graders
        """Grader of each benchmark by its name, and of the training samples by None."""
        self._drawing = threading.Lock()
        self._draws: dict[str, Draw[PromptRow]] = {}
        """The newest draw, by the digest of its arguments."""
        self._noticed: set[str] = set()
        self._noticing = threading.Lock()

    def seen_as(self, config: RunConfig) -> "RunContext":
        """Return this run with another view of its configuration. All state is shared."""
        seen = copy(self)
        seen.config = config
        return seen

    @property
    def records_support(self) -> bool:
        """Whether rollouts record the sampling support of each token, so that scores are computed within it."""
        return self.config.rollout.cuts_vocabulary

    @property
    def fleet(self) -> "Fleet":
        """The engines. They start in the background; the first access waits for them, until the deadline of the
        start."""
        return self._fleet()

    @property
    def grader(self) -> Grading:
        """The grader of the training samples."""
        return self.graders[None]

    def draw(
        self, cursor: JsonValue, count: int, without: Sequence[int] = (), earlier: Sequence[Commit] = ()
    ) -> Draw[PromptRow]:
        """Return the `count` prompts after `cursor` that are not among `without`. The shards of a round share one draw.

        Args:
            earlier: the filter step that left the cursor. Its groups matter where the next prompts depend on results.
        """
        assert not isinstance(self.data, DemonstrationData)
        key = canonical.digest([cursor, count, list(without), [commit.digest for commit in earlier]])
        with self._drawing:
            if key not in self._draws:
                learns = earlier and learns_from_results(self.config)
                draw = next_prompts(
                    self.config,
                    self.data,
                    cursor,
                    count,
                    unreported_results(self, earlier[-1]) if learns else (),
                    max_prompt_len=self.max_prompt_len,
                    without=frozenset(without),
                )
                self._draws.clear()
                self._draws[key] = draw
            return self._draws[key]

    def attach(self, service: object) -> None:
        """Share an object with all steps, which look it up by its class. It replaces an object of the same class."""
        self._attached[type(service)] = service

    def detach(self, kind: type) -> None:
        """Stop sharing the object of this class."""
        self._attached.pop(kind, None)

    def attached(self, kind: type[Service]) -> Service | None:
        """Return the shared object of this class; None without one."""
        return self._attached.get(kind)  # type: ignore[return-value]

    def notice(self, what: str) -> bool:
        """Return whether this is new to the driver, and record it: for messages that are reported once."""
        with self._noticing:
            new = what not in self._noticed
            self._noticed.add(what)
        return new

    def input_commit(self, commit: Commit, name: str) -> Commit:
        """Return the commit that `commit` names as an input. Raises Damaged if it is not the one that was read then."""
        current = self.committed(*parse_commit_name(name))
        if current.digest != commit.inputs[name]:
            raise Damaged(
                f"{commit.name} was made from {name} with digest {commit.inputs[name]}, but the ledger holds "
                f"{current.digest}"
            )
        return current

    def config_of(self, commit: Commit) -> RunConfig:
        """Return the whole configuration that a commit was made under, ready to be executed. For a commit that is
        shared with a parent, this is the parent's. Raises ConfigError where it contains something that a store must not
        request.
        """
        recorded = self.ledger.config_of(commit)
        return self.whole_config if recorded == self.whole_config else self._trusted(recorded)

    def commit(self, **fields: Any) -> Commit:
        """Create a commit, or adopt the one that another driver created first. Waits for unfinished steps of iterations
        that no driver would enter again after it, and raises the error of one that failed."""
        self.unfinished.wait(before=fields["iteration"] - self.ledger.lag)
        commit = self.ledger.commit(**fields)
        self._commits.add((commit.iteration, commit.step, commit.shard), commit)
        return commit
