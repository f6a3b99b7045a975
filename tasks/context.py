"""What every step of a live run shares: configuration, ledger, data, grader and fleet."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.schema.run import RunConfig
from storage.commits import Commit, Environment, OutputFile, Step
from storage.errors import Damaged
from storage.ledger import Ledger
from storage.snapshots import read_table
from tasks.data import Draw, PromptData, draw
from tasks.events import Message, StepCommitted, StepStarted
from tasks.rewards.pool import GraderPool

if TYPE_CHECKING:
    from engines.fleet import Fleet

TABLES_KEPT = 32
"""Snapshots kept in memory after they were written or read: later steps of the iteration read them again."""


class RunContext:
    """A live run in its driver's process. Thread-safe: shards of a step run at the same time.

    A plain class on purpose: Prefect looks into dataclasses and models that are passed to tasks.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        *,
        fleet: "Callable[[], Fleet]",
        tokenizer: Any,
        data: PromptData,
        max_prompt_len: int,
        benchmarks: dict[str, PromptData],
        graders: dict[str | None, GraderPool],
        environment: Environment,
        emit: Callable[[StepStarted | StepCommitted | Message], None],
    ) -> None:
        """`fleet` returns the engines once they are up. `max_prompt_len` is in tokens. `graders` maps the name of a
        benchmark to its grader, None to the training's."""
        self.config = config
        self.ledger = ledger
        self.tokenizer = tokenizer
        self.data = data
        self.max_prompt_len = max_prompt_len
        self.emit = emit
        self.environment = environment
        self.weights_lock = threading.RLock()
        """Held while the training engine is moved to a state, and while rollout engines take its weights."""
        self.failed_generations: Counter[tuple[str, int]] = Counter()
        """How often an engine failed while it generated a group, by step and request: see tasks.generation."""
        self._fleet = fleet
        self._benchmarks = benchmarks
        self._graders = graders
        self._lock = threading.Lock()
        self._commits: dict[tuple[int, Step, str | None], Commit] = {}
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()
        self._draws: dict[tuple[int, int], Draw] = {}

    @property
    def fleet(self) -> "Fleet":
        """The engines. They start beside everything else; whoever needs them first waits, with the start's deadline."""
        return self._fleet()

    @property
    def grader(self) -> GraderPool:
        """The grader of the training samples."""
        return self._graders[None]

    def benchmark_data(self, name: str) -> PromptData:
        """Prompts of a benchmark."""
        return self._benchmarks[name]

    def benchmark_grader(self, name: str) -> GraderPool:
        """Grader of a benchmark."""
        return self._graders[name]

    def draw(self, cursor: int, count: int) -> Draw:
        """The `count` prompts after `cursor`; the shards of a round share one draw."""
        with self._lock:
            if (cursor, count) not in self._draws:
                self._draws = {
                    (cursor, count): draw(
                        self.data,
                        cursor,
                        count,
                        seed=self.config.seed,
                        shuffle=self.config.data.rollout_shuffle,
                        max_prompt_len=self.max_prompt_len,
                    )
                }
            return self._draws[cursor, count]

    def find(self, iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        """The step's commit if there is one. Commits never change, so one that was seen is not read again."""
        key = (iteration, step, shard)
        if key not in self._commits:
            commit = self.ledger.find(iteration, step, shard)
            if commit is None:
                return None
            self._commits[key] = commit
        return self._commits[key]

    def committed(self, iteration: int, step: Step, shard: str | None = None) -> Commit:
        """The step's commit. Raises Damaged where it must be and is not."""
        commit = self.find(iteration, step, shard)
        if commit is None:
            name = f"{iteration:06d}/{step}" + (f".{shard}" if shard else "")
            raise Damaged(f"the commit {name} of run {self.ledger.run} is missing, but later steps were made from it")
        return commit

    def input_commit(self, commit: Commit, name: str) -> Commit:
        """The commit that `commit` names as an input. Raises Damaged if it is not the one that was read then."""
        iteration, _, rest = name.partition("/")
        step, _, shard = rest.partition(".")
        found = self.committed(int(iteration), Step(step), shard or None)
        if found.digest != commit.inputs[name]:
            raise Damaged(
                f"{commit.name} was made from {name} with digest {commit.inputs[name]}, the ledger holds {found.digest}"
            )
        return found

    def config_at(self, iteration: int) -> RunConfig:
        """The configuration under which an iteration was or will be made: a parent's for those shared with it."""
        owner = self.ledger.owner(iteration)
        return self.config if owner is self.ledger else RunConfig.model_validate(owner.manifest.config)

    def commit(self, **fields: Any) -> Commit:
        """Create a commit, or adopt the one that another driver created first."""
        commit = self.ledger.commit(environment=self.environment, **fields)
        self._commits[commit.iteration, commit.step, commit.shard] = commit
        return commit

    def read(self, commit: Commit, columns: Sequence[str] | None = None) -> pa.Table:
        """The Parquet snapshot of a commit that has exactly one, checked against its digest."""
        (output,) = commit.outputs
        with self._lock:
            table = self._tables.get(output.sha256)
        if table is None:
            table = read_table(self.ledger.store, commit.run, output)
            self.remember(output, table)
        return table if columns is None else table.select(list(columns))

    def remember(self, output: OutputFile, table: pa.Table) -> None:
        """Keep a snapshot that was just written: the next steps read it."""
        with self._lock:
            self._tables[output.sha256] = table
            while len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)

    def external_digest(self, name: str) -> str | None:
        """Digest of an input from outside the ledger, as the run's manifest fixed it; None if the run has none such."""
        return self.ledger.manifest.inputs.get(name)

    def plugin_digest(self, field: str) -> str:
        """Source digest of the user code that a configuration field names, as the run's manifest fixed it; empty where
        it names a built-in."""
        return self.ledger.manifest.inputs.get(field, "")
