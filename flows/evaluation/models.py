"""Weights to evaluate: those of a model folder, or those after iterations of a run."""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from cairn.configs.errors import BadInput
from cairn.configs.loader import from_manifest
from cairn.configs.schema.evaluation import EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.files import folder_digest
from cairn.engines.models.folders import check_model_folder
from cairn.engines.types.errors import BadModel
from cairn.engines.weights.checksum import folder_checksum
from cairn.flows.driver.trust import recorded_config
from cairn.flows.evaluation.benchmarks import OwnBenchmark, own_benchmarks
from cairn.flows.events import Event
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.decisions import Decision, Pin
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.store import Store
from cairn.storage.upkeep.retention import pin
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.stored_weights import has_weights

# Pins protect weights against the run's retention while an evaluation copies them.


WHY = "an evaluation copies its weights"
"""Reason in the pin's decision. If the evaluation is killed the pin stays until a person unpins the iteration."""
_ENDED = re.compile(r"the evaluation of decision (\d+) has copied its weights")


class _AlreadyDecided(Exception):
    """A person has decided about the iteration meanwhile, so no further decision is needed."""


@contextmanager
def temporary_pin(ledger: Ledger, iteration: int) -> Iterator[None]:
    """Pin an iteration while the block runs, unless its run retains everything or a person has pinned it.

    If several evaluations copy it at once, the one that ends last unpins it. Raises Retired if it is gone.
    """
    owner = ledger.owner(iteration)
    if from_manifest(owner.manifest.config).checkpoint.retains_everything or _pins(owner.decisions.all(), iteration)[0]:
        yield
        return
    own = pin(owner, iteration, why=WHY)
    try:
        yield
    finally:
        with suppress(_AlreadyDecided):
            _unpin(owner, iteration, own.number)


def _unpin(ledger: Ledger, iteration: int, own: int) -> None:
    def release(so_far: tuple[Decision, ...]) -> Pin:
        by_a_person, copying = _pins(so_far, iteration)
        if by_a_person or own not in copying:
            raise _AlreadyDecided
        return Pin(iteration=iteration, kept=copying != {own})

    ledger.decisions.record(release, why=f"the evaluation of decision {own} has copied its weights")


def _pins(decisions: Iterable[Decision], iteration: int) -> tuple[bool, set[int]]:
    """Return whether a person has pinned an iteration, and the decision numbers of pins of evaluations that copy it."""
    by_a_person, copying = False, set[int]()
    for decision in decisions:
        if not isinstance(decision.what, Pin) or decision.what.iteration != iteration:
            continue
        if decision.why == WHY and decision.what.kept:
            copying.add(decision.number)
        elif ended := _ENDED.fullmatch(decision.why or ""):
            copying.discard(int(ended[1]))
        else:
            by_a_person, copying = decision.what.kept, set()
    return by_a_person, copying


Say = Callable[[str], None]
_ITERATIONS = r"(?P<first>\d{1,6})(?P<range>:(?P<last>\d{1,6})?)?"
_PLACE = re.compile(rf"(?P<run>[^@]+)(?:@(?:(?P<word>latest|initial)|{_ITERATIONS}))?")


class BadPlace(BadInput):
    """A run, or an iteration of it, that cannot be evaluated as requested. The message is one clear sentence."""


class ModelFolder:
    """Weights with their tokenizer, in a folder in Hugging Face format. Closed after the last evaluation."""

    def __init__(
        self, path: str, options: EngineOptions, name: str | None = None, origin: Mapping[str, Any] | None = None
    ) -> None:
        self.base = path
        """Model folder with their configuration and tokenizer; a subclass may have other weights."""
        self.name = name or path
        """Name for people: `quickstart@39`, or the folder."""
        self.options = options
        """Engine options of the evaluation."""
        self.origin: Mapping[str, Any] = origin or {"model": str(Path(path).absolute())}
        """Origin for the result: `cairn.storage.evals.Evaluation.origin`."""

    @cached_property
    def weights(self) -> str:
        """Digest of the weights in the options' number format."""
        return folder_checksum(self.folder(), self.options.dtype)

    def folder(self) -> str:
        """Return a model folder with the weights themselves; valid until `close`."""
        return self.base

    def close(self) -> None:
        """Delete temporary files."""


class Published(ModelFolder):
    """The weights that an iteration of a run published. `folder` first writes them into the evaluation's own folder, so
    a later removal by the run does no harm. Where the run stored them they are read, and no trainer starts.

    Their digest is the publication's, in the ledger; in a number format other than the run's it is that of the
    export."""

    def __init__(self, ledger: Ledger, synced: Commit, base: str, options: EngineOptions, say: Say) -> None:
        """`synced`: commit of the publication. `base`: folder of the run's initial model."""
        origin = {
            "run": ledger.run,
            "iteration": synced.iteration,
            "weight_version": synced.weight_version_out,
            "publication": f"{synced.run}/{synced.name}@{synced.digest}",
        }
        super().__init__(base, options, f"{ledger.run}@{synced.iteration}", origin)
        self._ledger = ledger
        self._synced = synced
        self._say = say
        self._room: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def weights(self) -> str:
        published = self._synced.values.get("digest")
        if isinstance(published, str) and self._config.rollout.dtype == self.options.dtype:
            return published
        return folder_checksum(self.folder(), self.options.dtype)

    def folder(self) -> str:
        if self._room is None:
            from cairn.flows.export.model import export, export_stored

            self._room = tempfile.TemporaryDirectory(prefix="cairn-eval-")
            target = Path(self._room.name) / "model"
            with temporary_pin(self._ledger, self._synced.iteration):
                # Stored weights are rounded to the rollout's format.
                suffices = self._config.rollout.dtype in (self.options.dtype, self._config.training.dtype)
                if suffices and has_weights(self._ledger, self._synced):
                    export_stored(self._ledger, self._synced, target, self._on_event)
                else:
                    export(self._ledger, target, self._synced.iteration, emit=self._on_event)
        return str(Path(self._room.name) / "model")

    @cached_property
    def _config(self) -> RunConfig:
        """Configuration that the weights were published under."""
        return self._ledger.config_of(self._synced)

    def close(self) -> None:
        if self._room is not None:
            self._room.cleanup()
            self._room = None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self._say(f"{self.name}: {event.text}")


def weights_to_evaluate(
    store: Store, run: str | None, model: str | None, every: int | None, options: Mapping[str, Any], say: Say
) -> Sequence[ModelFolder]:
    """Return the weights to evaluate. Raises BadPlace, and pydantic's ValidationError for options."""
    if run is not None:
        return models_of(store, run, every, options, say)
    assert model is not None
    if every is not None:
        raise BadPlace("every N-th needs a range of iterations, RUN@A:B")
    return [ModelFolder(model, EngineOptions.model_validate(options))]


def benchmarks_of_run(store: Store, place: str) -> dict[str, OwnBenchmark]:
    """Return a run's own benchmarks by name. Raises BadPlace, and ConfigError as `models_of` does."""
    run = place.partition("@")[0]
    try:
        return own_benchmarks(recorded_config(Ledger.open(store, run)))
    except (FileNotFoundError, ValueError) as error:
        raise BadPlace(str(error)) from None


def models_of(
    store: Store, place: str, every: int | None = None, overrides: Mapping[str, Any] | None = None, say: Say = print
) -> Sequence[ModelFolder]:
    """Return the weights that `RUN`, `RUN@latest`, `RUN@initial`, `RUN@ITER`, `RUN@A:B` or `RUN@A:` names; of a range
    each `every`-th iteration from A to B inclusive. `overrides`: options that override the run's.

    Raises BadPlace, and ConfigError where the run's configuration contains what a store may not set.
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        raise BadPlace(f"{place!r} is not RUN, RUN@ITER or RUN@A:B, such as quickstart@39 or quickstart@0:39")
    if every is not None and match["range"] is None:
        raise BadPlace(f"--every needs a range of iterations, such as {match['run']}@0:39")
    try:
        ledger = Ledger.open(store, match["run"])
    except (FileNotFoundError, ValueError) as error:
        raise BadPlace(str(error)) from None
    config = recorded_config(ledger)
    options = EngineOptions.of_run(config.rollout, overrides or {})
    if match["word"] == "initial":
        return [_initial(ledger, config, options)]
    base = config.model.path
    return [Published(ledger, synced, base, options, say) for synced in _published(ledger, match, every or 1)]


def _published(ledger: Ledger, match: re.Match[str], every: int) -> list[Commit]:
    last = ledger.last_iteration()
    newest = -1 if last is None else last
    while newest >= 0 and ledger.find(newest, Step.SYNC) is None:
        newest -= 1
    if newest < 0:
        raise BadPlace(f"run {ledger.run!r} has published no weights yet: evaluate {ledger.run}@initial")
    if match["first"] is None:
        wanted = [newest]
    elif match["range"] is None:
        wanted = [int(match["first"])]
    else:
        wanted = list(range(int(match["first"]), (newest if match["last"] is None else int(match["last"])) + 1, every))
    if not wanted or wanted[-1] > newest:
        raise BadPlace(f"{match[0]!r} names an iteration that is not published: {ledger.run!r} has 0 to {newest}")
    commits = [ledger.find(iteration, Step.SYNC) for iteration in wanted]
    published = [synced for synced in commits if synced is not None]
    if not published:
        raise BadPlace(f"{match[0]!r} names no published iteration; the newest one of {ledger.run!r} is {newest}")
    return published


def _initial(ledger: Ledger, config: RunConfig, options: EngineOptions) -> ModelFolder:
    base, recorded = config.model.path, ledger.manifest.inputs.get("model")
    check_model_folder(base)
    if recorded is not None and folder_digest(Path(base), recorded) != recorded:
        raise BadModel(f"{base} is not the model that run {ledger.run} started from: restore that model there")
    origin = {"run": ledger.run, "iteration": None, "weight_version": 0}
    return ModelFolder(base, options, f"{ledger.run}@initial", origin)
