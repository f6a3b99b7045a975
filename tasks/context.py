"""What every step of a live run shares: configuration, ledger, data, grader and fleet."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.storage import canonical
from cairn.storage.commits import Commit, Environment, Step
from cairn.storage.errors import Damaged
from cairn.storage.ledger import Ledger
from cairn.tasks.casualties import Casualties
from cairn.tasks.data import (
    Data,
    DemonstrationData,
    Draw,
    PromptData,
    PromptRow,
    learns_from_results,
    next_prompts,
)
from cairn.tasks.events import StepEvent
from cairn.tasks.recorded_run import RecordedRun
from cairn.tasks.replays import ReplayTally
from cairn.tasks.response_lengths import ResponseLengths
from cairn.tasks.retries import RetryTally
from cairn.tasks.rewards.grading import Grading
from cairn.tasks.round_results import untold_results
from cairn.tasks.rules import untold

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet
    from cairn.tasks.streaming.stream import Stream


class RunContext(RecordedRun):
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
        data: Data,
        max_prompt_len: int,
        benchmarks: dict[str, PromptData],
        graders: dict[str | None, Grading],
        environment: Environment,
        emit: Callable[[StepEvent], None],
        trusted: Callable[[RunConfig], RunConfig] = lambda recorded: recorded,
    ) -> None:
        """`fleet` returns the engines once they are up. `max_prompt_len` is in tokens. `graders` maps the name of a
        benchmark to its grader, None to the training's. `trusted` returns a recorded configuration with code that may
        be imported, or raises ConfigError; by default none may."""
        super().__init__(config, ledger)
        self._whole_config, self._trusted = config, trusted
        self.tokenizer = tokenizer
        self.data = data
        self.max_prompt_len = max_prompt_len
        self.emit = emit
        self.environment = environment
        self.weights_lock = threading.RLock()
        """Held while the training engine is moved to a state, works from it, or publishes its weights."""
        self.stopping = threading.Event()
        """Set when the driver ends before its time: no step is to begin, or to be tried again."""
        self.suspects_lock = threading.Lock()
        """Held while a group that may end its engine is generated alone."""
        self.stream: Stream | None = None
        """What generates samples all the time, where the run streams."""
        self.side_by_side = False
        """Whether one thread learns while another collects."""
        self.failed_generations: Counter[tuple[str, int]] = Counter()
        """How often an engine itself failed on a group, by step and request: see cairn.tasks.generation."""
        self.casualties = Casualties()
        """What engines had before them when they were lost."""
        self.response_lengths = ResponseLengths()
        """Of the rollouts that this driver made."""
        self.retries = RetryTally(config.retry)
        """New tries of steps."""
        self.replays = ReplayTally()
        """Train steps that are done again."""
        self._fleet = fleet
        self._benchmarks = benchmarks
        self._graders = graders
        self._drawing = threading.Lock()
        self._draws: dict[str, Draw[PromptRow]] = {}
        self._noticed: set[str] = set()

    def seen_as(self, config: RunConfig) -> "RunContext":
        """This run, all of its state shared, with another view of its configuration."""
        return _Seen(self, config)

    @property
    def records_kept(self) -> bool:
        """Whether rollouts record what was left of the vocabulary to draw each token from, for it to be scored within
        that."""
        rollout = self.config.rollout
        return rollout.cuts_vocabulary and untold(rollout, self.ledger.manifest.schema_version) is None

    @property
    def fleet(self) -> "Fleet":
        """The engines. They start beside everything else; whoever needs them first waits, with the start's deadline."""
        return self._fleet()

    @property
    def grader(self) -> Grading:
        """The grader of the training samples."""
        return self._graders[None]

    def benchmark_data(self, name: str) -> PromptData:
        """Prompts of a benchmark."""
        return self._benchmarks[name]

    def benchmark_grader(self, name: str) -> Grading:
        """Grader of a benchmark."""
        return self._graders[name]

    def draw(
        self, cursor: JsonValue, count: int, without: Sequence[int] = (), earlier: Sequence[Commit] = ()
    ) -> Draw[PromptRow]:
        """The `count` prompts after `cursor` that are none of `without`; the shards of a round share one draw.
        `earlier`: the filter step that left the cursor, whose groups say where what comes next depends on them."""
        assert not isinstance(self.data, DemonstrationData)
        key = canonical.digest([cursor, count, list(without), [commit.digest for commit in earlier]])
        with self._drawing:
            if key not in self._draws:
                learns = earlier and learns_from_results(self.config)
                self._draws = {
                    key: next_prompts(
                        self.config,
                        self.data,
                        cursor,
                        count,
                        untold_results(self, earlier[-1]) if learns else (),
                        max_prompt_len=self.max_prompt_len,
                        without=frozenset(without),
                    )
                }
            return self._draws[key]

    def notice(self, what: str) -> bool:
        """Whether this is new to the driver: for what is told once."""
        with self._lock:
            new = what not in self._noticed
            self._noticed.add(what)
        return new

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

    def config_of(self, commit: Commit) -> RunConfig:
        """All of the configuration that a commit was made under, a parent's for one shared with it, to be executed.
        Raises ConfigError where a store must not ask for something in it."""
        recorded = from_manifest(self.ledger.terms_of(commit).config)
        return self._whole_config if recorded == self._whole_config else self._trusted(recorded)

    def commit(self, **fields: Any) -> Commit:
        """Create a commit, or adopt the one that another driver created first."""
        commit = self.ledger.commit(**fields)
        self._commits[commit.iteration, commit.step, commit.shard] = commit
        return commit


class _Seen(RunContext):
    """A run as one step sees it. Methods run on it, so that they see the step's configuration too; attributes are the
    run's own."""

    def __init__(self, run: RunContext, config: RunConfig) -> None:
        self.__dict__.update(_run=run, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_run"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._run, name, value)
