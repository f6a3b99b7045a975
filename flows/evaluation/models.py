"""Whose weights are evaluated: those of a model folder, or those that iterations of a run left."""

import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from cairn.configs.loader import from_manifest
from cairn.configs.schema.engine_options import EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.engines.errors import BadModel
from cairn.engines.model_files import folder_digest
from cairn.engines.models import check_model_folder
from cairn.engines.weights.folders import folder_checksum
from cairn.flows.driver.trust import recorded_config
from cairn.flows.evaluation.keeping import kept
from cairn.flows.evaluation.own import OwnBenchmark, own_benchmarks, sampled_by_the_run
from cairn.flows.events import Event
from cairn.storage.commits import Commit, Step
from cairn.storage.ledger import Ledger
from cairn.storage.store import Store
from cairn.tasks.evaluation import Sampled
from cairn.tasks.events import Message
from cairn.tasks.questions import Questions

Say = Callable[[str], None]
_ITERATIONS = r"(?P<first>\d{1,6})(?P<range>:(?P<last>\d{1,6})?)?"
_PLACE = re.compile(rf"(?P<run>[^@]+)(?:@(?:(?P<word>latest|initial)|{_ITERATIONS}))?")


class BadPlace(Exception):
    """A run, or an iteration of it, that cannot be evaluated as asked for. The message is one clear sentence."""


class Evaluable(Protocol):
    """Weights with their tokenizer. Closed when nothing more is asked of it."""

    @property
    def name(self) -> str:
        """For people: `quickstart@39`, or the folder."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """For the result: `cairn.storage.evals.Evaluation.origin`."""

    @property
    def options(self) -> EngineOptions:
        """What they are evaluated with."""

    @property
    def base(self) -> str:
        """A model folder with their configuration and tokenizer; its weights may be others."""

    @property
    def weights(self) -> str:
        """Their digest in the options' number format."""

    def folder(self) -> str:
        """A model folder with the weights themselves, until `close`."""

    def sampled(self, own: OwnBenchmark, questions: Questions) -> Sampled | None:
        """What a run itself sampled of these questions, by an engine of the same kind and number format."""

    def close(self) -> None:
        """Remove what was written."""


class ModelFolder:
    """A folder in Hugging Face format."""

    def __init__(self, path: str, options: EngineOptions) -> None:
        self.name = self.base = path
        self.options = options
        self.origin: Mapping[str, Any] = {"model": str(Path(path).absolute())}

    @cached_property
    def weights(self) -> str:
        return folder_checksum(self.base, self.options.dtype)

    def folder(self) -> str:
        return self.base

    def sampled(self, own: OwnBenchmark, questions: Questions) -> Sampled | None:
        return None

    def close(self) -> None:
        pass


class Initial(ModelFolder):
    """The weights that a run began with."""

    def __init__(self, ledger: Ledger, base: str, options: EngineOptions) -> None:
        super().__init__(base, options)
        self.name = f"{ledger.run}@initial"
        self.origin = {"run": ledger.run, "iteration": None, "weight_version": 0}
        self._ledger = ledger

    def sampled(self, own: OwnBenchmark, questions: Questions) -> Sampled | None:
        return sampled_by_the_run(self._ledger, 0, 0, own, questions, self.options)


class Published:
    """The weights that an iteration of a run left and published. Whoever needs more than their digest has them exported
    first, into a folder of the evaluation's own: what the run then removes of them, the evaluation keeps.

    The digest is the publication's, in the ledger; in another number format than the run's it is that of the export."""

    def __init__(self, ledger: Ledger, synced: Commit, base: str, options: EngineOptions, say: Say) -> None:
        """`synced`: commit of the publication. `base`: the folder that the run began with."""
        self.name = f"{ledger.run}@{synced.iteration}"
        self.base = base
        self.options = options
        self.origin: Mapping[str, Any] = {
            "run": ledger.run,
            "iteration": synced.iteration,
            "weight_version": synced.weight_version_out,
            "publication": f"{synced.run}/{synced.name}@{synced.digest}",
        }
        self._ledger = ledger
        self._synced = synced
        self._say = say
        self._room: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def weights(self) -> str:
        published = self._synced.values.get("digest")
        same_format = from_manifest(self._ledger.terms_of(self._synced).config).rollout.dtype == self.options.dtype
        if isinstance(published, str) and same_format:
            return published
        return folder_checksum(self.folder(), self.options.dtype)

    def folder(self) -> str:
        if self._room is None:
            from cairn.flows.export.model import export

            self._room = tempfile.TemporaryDirectory(prefix="cairn-eval-")
            with kept(self._ledger, self._synced.iteration):
                export(self._ledger, Path(self._room.name) / "model", self._synced.iteration, emit=self._told)
        return str(Path(self._room.name) / "model")

    def close(self) -> None:
        if self._room is not None:
            self._room.cleanup()
            self._room = None

    def sampled(self, own: OwnBenchmark, questions: Questions) -> Sampled | None:
        synced, version = self._synced, self._synced.weight_version_out
        assert version is not None
        return sampled_by_the_run(self._ledger, synced.iteration, version, own, questions, self.options)

    def _told(self, event: Event) -> None:
        if isinstance(event, Message):
            self._say(f"{self.name}: {event.text}")


def weights_to_evaluate(
    store: Store, run: str | None, model: str | None, every: int | None, options: Mapping[str, Any], say: Say
) -> list[Evaluable]:
    """What is to be evaluated. Raises BadPlace, and pydantic's ValidationError for options."""
    if run is not None:
        return models_of(store, run, every, options, say)
    assert model is not None
    if every is not None:
        raise BadPlace("every N-th is of iterations of a run, RUN@A:B")
    return [ModelFolder(model, EngineOptions.model_validate(options))]


def benchmarks_of_run(store: Store, place: str) -> dict[str, OwnBenchmark]:
    """A run's own benchmarks by name. Raises BadPlace, and ConfigError as `models_of` does."""
    run = place.partition("@")[0]
    try:
        return own_benchmarks(recorded_config(Ledger.open(store, run)))
    except (FileNotFoundError, ValueError) as error:
        raise BadPlace(str(error)) from None


def models_of(
    store: Store, place: str, every: int | None = None, given: Mapping[str, Any] | None = None, say: Say = print
) -> list[Evaluable]:
    """What `RUN`, `RUN@latest`, `RUN@initial`, `RUN@ITER`, `RUN@A:B` or `RUN@A:` names; of a range each `every`-th
    iteration from A on, B included. `given`: options that are not to be the run's. Raises BadPlace, and ConfigError
    where a store must not ask for what the run's configuration does."""
    match = _PLACE.fullmatch(place)
    if match is None:
        raise BadPlace(f"{place!r} is not RUN, RUN@ITER or RUN@A:B, such as quickstart@39 or quickstart@0:39")
    if every is not None and match["range"] is None:
        raise BadPlace(f"--every goes with a range of iterations, such as {match['run']}@0:39")
    try:
        ledger = Ledger.open(store, match["run"])
    except (FileNotFoundError, ValueError) as error:
        raise BadPlace(str(error)) from None
    config = recorded_config(ledger)
    options = EngineOptions.of_run(config.rollout, given or {})
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
        raise BadPlace(f"{match[0]!r} names no iteration that is published: {ledger.run!r} has 0 to {newest}")
    found = [ledger.find(iteration, Step.SYNC) for iteration in wanted]
    return [synced for synced in found if synced is not None]


def _initial(ledger: Ledger, config: RunConfig, options: EngineOptions) -> ModelFolder:
    base, recorded = config.model.path, ledger.manifest.inputs.get("model")
    check_model_folder(base)
    if recorded is not None and folder_digest(Path(base), recorded) != recorded:
        raise BadModel(f"{base} is not the model that run {ledger.run} began with: put that one back there")
    return Initial(ledger, base, options)
