"""Data sources written for slime: classes with `get_samples(num_samples)`.

`RolloutDataSource` draws the rows of `data.path` in their order, or shuffled. Classes of the user's derive from it, or
from nothing. An instance is made with `args`, and `dataset` where its constructor has that parameter. Its memory is
what a data source with a state commits (`cairn.tasks.data.stream`):

| attribute | committed |
|---|---|
| JSON values, tuples, sets, deques, samples and groups of samples | yes, where they have changed |
| `random.Random`, the position in a `Dataset` | yes |
| iterators | no: refused, since their position cannot be stored |
| anything else that the constructor made, such as a tokenizer | no: it must not change |

`add_samples(groups)` of the user's gets the groups that were judged since the last call, as prompts with their mean
reward. Unfinished and surplus groups wait in the ledger's own buffer, whatever the source.
"""

import copy
import inspect
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cairn.configs.errors import BadData
from cairn.configs.plugins import BadPlugin
from cairn.configs.slime import Arguments, Status
from cairn.engines.agents.slime import Sample
from cairn.tasks.data.files import rows as file_rows


class Group(list[Sample]):
    """A group of samples, with the attributes of its first one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self:
            raise AttributeError(name)
        return getattr(self[0], name)


class Dataset:
    """The rows of `args.prompt_data` as samples, in an order that the seed and the epoch fix."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self.samples = [_sample(row, args) for row in file_rows(args.prompt_data)]
        self._order = list(range(len(self.samples)))
        self.position = 0
        """Samples that `sample` has drawn, over all epochs."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return copy.deepcopy(self.samples[self._order[index]])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of an epoch."""
        self._order = list(range(len(self.samples)))
        random.Random(f"{self._args.rollout_seed}/{epoch}").shuffle(self._order)

    def sample(self, count: int) -> list[Any]:
        """Return the next prompts, epoch after epoch."""
        drawn: list[Any] = []
        for _ in range(count):
            epoch, place = divmod(self.position, len(self))
            if self._args.rollout_shuffle and (place == 0 or not drawn):
                self.shuffle(epoch)
            drawn.append(self[place].prompt)
            self.position += 1
        return drawn


def _sample(row: Mapping[str, Any], args: Any) -> Sample:
    label = None if args.label_key is None else row.get(args.label_key)
    metadata = None if args.metadata_key is None else row.get(args.metadata_key)
    return Sample(prompt=row[args.input_key], label=label, metadata=dict(metadata or {}))


class DataSource(ABC):
    """A source of prompts."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Any]:
        """Return the next groups of samples, one a prompt, or one sample a prompt."""


class RolloutDataSource(DataSource):
    """The prompts of `data.path`, epoch after epoch."""

    def __init__(self, *given: Any, args: Any = None, dataset: Any = None) -> None:
        """Open the prompts. `args` and `dataset` may come in any order; without a data set it is that of `args`."""
        found = next((one for one in given if isinstance(one, Arguments)), args)
        self.args = found
        self.dataset = next((one for one in given if one is not found), dataset) or Dataset(found)
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[Any]:
        """Return the next groups of `args.n_samples_per_prompt` samples."""
        groups: list[Any] = []
        for _ in range(num_samples):
            if self.sample_offset == len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
            if self.args.rollout_shuffle and (self.sample_offset == 0 or not groups):
                self.dataset.shuffle(self.epoch_id)
            group = Group(self.dataset[self.sample_offset] for _ in range(self.args.n_samples_per_prompt))
            for sample in group:
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
            self.sample_group_index += 1
            self.sample_offset += 1
            groups.append(group)
        return groups

    def add_samples(self, samples: list[Any]) -> None:
        """Ignore groups that were judged."""

    def __len__(self) -> int:
        return len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, after the groups that `add_samples` has put into `buffer`, as `buffer_filter` chooses them."""

    def __init__(self, *given: Any, args: Any = None, dataset: Any = None) -> None:
        super().__init__(*given, args=args, dataset=dataset)
        self.buffer: list[Any] = []

    def get_samples(self, num_samples: int) -> list[Any]:
        """Return groups of the buffer, then the next ones of the data."""
        chosen = list(self._choose(num_samples)) if self.buffer and num_samples else []
        self.buffer = [one for one in self.buffer if not any(one is other for other in chosen)]
        return chosen + super().get_samples(num_samples - len(chosen))

    def _choose(self, num_samples: int) -> Sequence[Any]:
        choose: Callable[..., Any] = self.buffer_filter
        more = (None,) if "rollout_id" in inspect.signature(choose).parameters else ()
        returned: Sequence[Any] = choose(self.args, *more, self.buffer, num_samples)
        return returned

    def buffer_filter(self, args: Any, buffer: list[Any], num_samples: int) -> list[Any]:
        """Return the groups of the buffer that are used next, at most `num_samples`."""
        return buffer[:num_samples]

    def add_samples(self, samples: list[Any]) -> None:
        """Put groups into the buffer."""
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self.buffer)


_OWN = (DataSource, RolloutDataSource, RolloutDataSourceWithBuffer)


def as_function(source: type, name: str, values: Mapping[str, Any]) -> Callable[..., tuple[list[Any], Any]]:
    """Return a data source with a state, `get_samples(path, state, count, results)`, that calls an instance of a class.

    Raises BadPlugin where the instance cannot be made, or has memory that cannot be stored.
    """
    args = Arguments(values)
    instance = _made(source, name, args)
    made = frozenset(vars(instance))
    begun = _memory(instance, name, known=made)
    own = getattr(source, "add_samples", None)
    hears = own is not None and all(own is not getattr(one, "add_samples", None) for one in _OWN)

    def get_samples(path: str, state: Any, count: int, results: Sequence[Any]) -> tuple[list[Any], Any]:
        state = state or {"memory": {}, "drawn": 0, "open": {}}
        now = _memory(instance, name, known=made)
        wanted = {**begun, **state["memory"]}
        for attribute in now.keys() - wanted.keys():  # set after this state, by a draw that is repeated
            delattr(instance, attribute)
        for attribute, value in wanted.items():
            if now.get(attribute) != value:
                _restore(instance, attribute, value)
        if hears and results:
            judged = [(state["open"].pop(str(one.prompt_index), None), one) for one in results]
            instance.add_samples([_judged(row, one, args) for row, one in judged if row is not None])
        samples = [one[0] if isinstance(one, list) else one for one in instance.get_samples(count)] if count else []
        rows = [{args.input_key: one.prompt, **_more(one, args)} for one in samples]
        if hears:
            state["open"] |= {str(number): row for number, row in enumerate(rows, state["drawn"])}
        now = _memory(instance, name, known=made)
        memory = {attribute: value for attribute, value in now.items() if begun.get(attribute) != value}
        return rows, {"memory": memory, "drawn": state["drawn"] + len(rows), "open": state["open"]}

    return get_samples


def _made(source: type, name: str, args: Arguments) -> Any:
    given: dict[str, Any] = {}
    for parameter, one in inspect.signature(source).parameters.items():
        if one.kind is one.VAR_POSITIONAL or one.kind is one.VAR_KEYWORD:
            continue
        if parameter in ("args", "config"):
            given[parameter] = args
        elif parameter in ("dataset", "data"):
            given[parameter] = Dataset(args)
        elif one.default is one.empty:
            raise BadPlugin(f"the data source {name!r} needs {parameter}: its constructor gets args and dataset alone")
    return source(**given) if given else source(args) if issubclass(source, RolloutDataSource) else source()


def _more(sample: Sample, args: Any) -> dict[str, Any]:
    row = {} if args.label_key is None else {args.label_key: sample.label}
    return row | ({} if args.metadata_key is None or not sample.metadata else {args.metadata_key: sample.metadata})


def _judged(row: Mapping[str, Any], result: Any, args: Any) -> Group:
    group = Group(_sample(row, args) for _ in range(args.n_samples_per_prompt))
    for sample in group:
        sample.group_index, sample.reward, sample.status = result.group_id, result.mean_reward, Status.COMPLETED
    return group


# The memory of an instance, as JSON.


def _memory(instance: Any, name: str, known: frozenset[str]) -> dict[str, Any]:
    """Return the attributes of an instance that can change. `known`: attributes that its constructor made."""
    memory = {}
    for attribute, value in vars(instance).items():
        if hasattr(value, "__next__"):
            raise BadPlugin(
                f"the data source {name!r} has an iterator, {attribute}, whose position no commit can hold: keep an "
                "index in its place"
            )
        try:
            memory[attribute] = _encoded(value)
        except TypeError:
            if attribute not in known or isinstance(value, list | dict | set | deque):
                raise BadData(
                    f"the data source {name!r} has set {attribute} to {type(value).__name__}, which no commit can "
                    "hold: keep JSON values or samples in it"
                ) from None
    return memory


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sample):
        return {"$": "sample", "of": {key: _encoded(one) for key, one in value.to_dict().items()}}
    if isinstance(value, Dataset):
        return {"$": "position", "of": value.position}
    if isinstance(value, random.Random):
        return {"$": "random", "of": _encoded(value.getstate())}
    for kind in (Group, tuple, set, deque):
        if isinstance(value, kind):
            items = sorted(value) if kind is set else value
            return {"$": kind.__name__, "of": [_encoded(one) for one in items]}
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    if type(value) is dict:
        return {"$": "dict", "of": [[_encoded(key), _encoded(one)] for key, one in value.items()]}
    raise TypeError(type(value).__name__)


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind, of = value["$"], value["of"]
    if kind == "sample":
        return Sample.from_dict({key: _decoded(one) for key, one in of.items()})
    if kind == "dict":
        return {_decoded(key): _decoded(one) for key, one in of}
    if kind == "random":
        found = random.Random()
        found.setstate(_decoded(of))
        return found
    made: dict[str, Callable[[Any], Any]] = {"Group": Group, "tuple": tuple, "set": set, "deque": deque}
    return made[kind](_decoded(one) for one in of)


def _restore(instance: Any, attribute: str, value: Any) -> None:
    if isinstance(value, dict) and value["$"] == "position":
        getattr(instance, attribute).position = value["of"]
    else:
        setattr(instance, attribute, _decoded(value))
