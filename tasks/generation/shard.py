"""The samples of one rollout shard: kept in the process that generates them, from the first token to the files of the
commit.

| how samples are generated | where their shard is |
|---|---|
| by a built-in function, which records no calls | in the engine's process, where that may write to the store |
| by code whose calls are recorded; in a replay, which writes to a folder of this machine | in the driver |
| a group is a suspect (`cairn.tasks.generation.generation`), and is generated alone | in the driver |

The driver sends an engine's process the plan of the shard, and gets what is left to generate, the ends of samples, and
the descriptions of files that it commits: one call for all of it, or for several shards. A process that works for a
driver that was replaced writes into that driver's attempt alone.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain, repeat
from socket import gethostname
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.models.tokenizers import load_tokenizer, tokenizer_digest
from cairn.engines.types.errors import BadModel, EngineError
from cairn.engines.types.keeping import KeeperRefused, SampleEnd, SampleSource, WantedSample
from cairn.engines.types.trajectories import GeneratedSample, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason, SamplingParams
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, OutputFile
from cairn.storage.ledger.layout import CALLS_FILE, IMAGES_FILE, run_manifest
from cairn.storage.ledger.schemas import RETOKENIZED, TRAJECTORIES, TRAJECTORY_PROMPTS, Status
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store
from cairn.tasks.batch.batch import with_optional
from cairn.tasks.durable.lengths import mean_lengths
from cairn.tasks.durable.recorded_run import Snapshots
from cairn.tasks.generation.calls import call_tables, uncertain_effects
from cairn.tasks.generation.checks import require_versions, usable
from cairn.tasks.generation.groups import (
    Group,
    RowFormat,
    finished_samples,
    image_table,
    sample_table,
    unfinished_group,
    without_unused,
)
from cairn.tasks.generation.progress import episode_metrics, failure_metrics
from cairn.tasks.generation.rounds import Unfinished, in_rounds, longest_first, until_enough


@dataclass(frozen=True)
class ShardPlan:
    """What the samples of a shard are made from: plain values, which go to another process."""

    run: str
    iteration: int
    step: str
    shard: str | None
    attempt: str
    input_digest: str
    earlier_digests: frozenset[str]
    """See `SampleLog`."""
    model: str
    """Absolute path of the model folder, on every machine."""
    tokenizer: str
    """Digest of its tokenizer."""
    engine: str
    """Name of the engine that generates."""
    version: int
    """Version of its weights."""
    format: RowFormat
    function: GenerateFunction
    params: SamplingParams
    cut_tokens: int | None
    """`rollout.cut_tokens`."""
    share: int | None
    """Groups without a failure that are needed; None for all of them. The others are aborted, or cut in rounds of
    tokens."""
    lengths: Mapping[int, float] | None
    """Mean response lengths of the prompts of groups, where they are known: the longest begin first. None where the
    order is that of the groups."""
    backwards: bool
    """Whether the order is reversed, as after the loss of an engine."""
    blamed: Mapping[int, str]
    """Groups that fail without being generated, each with its error."""
    fresh: Sequence[Group]
    continued: Sequence[tuple[Commit, int]]
    """Unfinished groups by their ids, each with the rollout that left it so."""


@dataclass(frozen=True)
class Left:
    """What is left to generate of a shard after earlier attempts."""

    prompts: Mapping[int, int]
    """Rows of the data by group."""
    missing: Mapping[int, Sequence[WantedSample]]
    """Missing samples by group, without the groups of which a sample has failed."""
    failed: frozenset[int]
    """These groups."""
    ended: Mapping[int, int]
    """Where samples are cut by tokens: by group, the round in which the last of its ended samples ended."""

    @property
    def usable(self) -> int:
        """Number of groups that are complete without a failure."""
        return sum(not samples for samples in self.missing.values())

    @property
    def recovered(self) -> int:
        """Number of groups that earlier attempts have ended."""
        return len(self.failed) + self.usable


@dataclass(frozen=True)
class ShardFiles:
    """The files of a shard, and what its commit says of them."""

    files: Sequence[OutputFile]
    superseded: Sequence[str]
    """Write-ahead parts that the commit makes useless."""
    metrics: Mapping[str, float]
    lengths: pa.Table
    """See `mean_lengths`."""
    seconds: float
    """Seconds for encoding and writing."""


class Shard:
    """Keeper of a shard's samples (`cairn.engines.types.keeping`). One thread at a time calls it."""

    def __init__(self, plan: ShardPlan, attempt: Attempt, snapshots: Snapshots, tokenizer: Any) -> None:
        """Read what earlier attempts have finished. `snapshots`: of the run, for the groups that are continued."""
        self._plan, self._attempt = plan, attempt
        self.groups = {group.prompt.group_id: group for group in (*_continued(plan, snapshots), *plan.fresh)}
        self._encode = partial(sample_table, plan.format, tokenizer, plan.engine, self.groups)
        self._log = SampleLog(
            attempt,
            plan.input_digest,
            schema=plan.format.schema(self.groups),
            encode=self._encode,
            earlier_digests=plan.earlier_digests,
        )
        self._recovered = self._log.recover()
        self._finished, self._errors = finished_samples(self._recovered)
        self._missing = {
            request.key: request
            for id, group in self.groups.items()
            if id not in self._errors
            for request in group.requests(finished=self._finished)
        }
        """Samples that have not ended. Those that were aborted begin with the tokens that they had then."""
        self._asked: dict[SampleKey, SampleRequest] = {}

    def left(self) -> Left:
        """Return what is left to generate."""
        missing: dict[int, list[WantedSample]] = {id: [] for id in self.groups if id not in self._errors}
        for (id, index), request in self._missing.items():
            missing[id].append(WantedSample(id, index, 0 if request.begun is None else len(request.begun)))
        cut_tokens = self._plan.cut_tokens
        ended = {} if cut_tokens is None else _ended_rounds(self._recovered, self.groups, cut_tokens)
        return Left(
            {id: group.prompt.index for id, group in self.groups.items()},
            missing,
            frozenset(self._errors),
            {id: rounds for id, rounds in ended.items() if id not in self._errors},
        )

    def generate(self, engine: SampleSource) -> Iterator[Left | list[SampleEnd]]:
        """Have an engine in this process generate the samples of a built-in function. Yield what is left to generate,
        and then the end of each sample."""
        yield self.left()
        yield from self.ends(partial(self._generate, engine))

    def ends(
        self, generate: Callable[[Sequence[WantedSample], int | None], Iterator[list[SampleEnd]]]
    ) -> Iterator[list[SampleEnd]]:
        """Yield the end of each sample that has not ended before. Those that are aborted come last.

        `generate`: generates samples until so many groups have ended, and then aborts the others; until all have ended
        where this is None.
        """
        plan, left = self._plan, self.left()
        wanted = list(chain.from_iterable(left.missing.values()))
        if plan.lengths is not None:
            wanted = longest_first(wanted, plan.lengths)
        if plan.share is None or plan.cut_tokens is None:
            stream = generate(wanted, None if plan.share is None else plan.share - left.usable)
        else:
            whole = lambda some: generate(some, None)  # noqa: E731
            stream = in_rounds(whole, wanted, cut_tokens=plan.cut_tokens, enough=plan.share, ended=left.ended)
        for ends in stream:
            self._fail({end.key: end.error for end in ends if end.error is not None and not end.kept})
            yield ends

    def _generate(
        self, engine: SampleSource, wanted: Sequence[WantedSample], enough: int | None
    ) -> Iterator[list[SampleEnd]]:
        plan, unfinished = self._plan, Unfinished(enough)
        if failed := [
            SampleEnd.failed(one, plan.blamed[one.group_id]) for one in wanted if one.group_id in plan.blamed
        ]:
            yield failed
        others = [one for one in wanted if one.group_id not in plan.blamed][:: -1 if plan.backwards else 1]
        if not others or unfinished.is_enough:
            yield list(map(SampleEnd.aborted, others))
            return
        unfinished.add(others)
        with closing(engine.generate(self.requests(others), plan.params, plan.function)) as samples:
            ends = (self.take(ended) for ended in samples if isinstance(ended, list))  # no calls are recorded
            yield from until_enough(plan.engine, ends, unfinished, engine.abort)

    def requests(self, wanted: Sequence[WantedSample]) -> list[SampleRequest]:
        """Return the requests for samples that have not ended."""
        requests = [replace(self._missing[one.key], cut_at=one.cut_at) for one in wanted]
        self._asked.update({request.key: request for request in requests})
        return requests

    def take(
        self, samples: Sequence[GeneratedSample], after: Callable[[Callable[[], None]], None] = lambda then: then()
    ) -> list[SampleEnd]:
        """Keep samples that ended. Return their ends.

        Raises EngineError for one from weights of another version, and what stopped the log's writer.

        Args:
            after: calls a function when the calls of the samples are durable, which must be before the samples are.
        """
        plan, ends = self._plan, []
        finished = []
        for sample in samples:
            request = self._asked[sample.key]
            sample = usable(plan.model, request, sample)
            require_versions(plan.engine, request, sample, (plan.version, plan.version))
            if sample.finish_reason == FinishReason.ABORT:
                segments = sample.trajectory.segments
                self._missing[sample.key] = replace(request, begun=segments[0] if segments else request.begun)
            else:
                finished.append(sample)
            ends.append(SampleEnd.of(sample))
        after(partial(self._log.append, *finished))
        for sample in finished:
            del self._missing[sample.key]
        return ends

    def _fail(self, errors: Mapping[SampleKey, str]) -> None:
        """Keep samples that failed and were not generated, with the error of each. Those that ended before their engine
        failed stay as they are; their group fails with the others."""
        requests = [self._missing.pop(key) for key in errors if key in self._missing]
        if requests:
            self._log.append(*(GeneratedSample.failed(request, errors[request.key]) for request in requests))

    def finish(self, calls: pa.Table | None = None) -> ShardFiles:
        """Write the files of the commit. Samples that have not ended are aborted.

        Args:
            calls: rows of CALLS; None where nothing is recorded.
        """
        began = time.perf_counter()
        plan, groups = self._plan, self.groups
        carried = [one for group in groups.values() for one in group.finished() if one.key not in self._finished]
        unended = carried + list(map(GeneratedSample.aborted, self._missing.values()))
        tables = [self._recovered, self._log.appended(), *([self._encode(unended)] if unended else [])]
        ended = pa.concat_tables(tables)
        samples, files = shard_files(ended, groups, self._encode, calls)
        aborted_rows = samples.filter(pc.field("status") == str(Status.ABORTED))
        aborted = len(aborted_rows.column("group_id").unique())
        carried_tokens = sum(group.carried_tokens() for group in groups.values())
        written = [self._attempt.write_table(name, table) for name, table in files.items()]
        return ShardFiles(
            written,
            tuple(self._attempt.superseded),
            {
                "samples": samples.num_rows,
                "aborted_groups": aborted,
                "prompt_tokens": _input_tokens(samples, groups, plan.cut_tokens),
                "cached_tokens": pc.sum(samples.column("cached_tokens")).as_py() or 0,
                "response_tokens": token_count(samples, "response_ids") - carried_tokens,
                **retold_metrics(plan.function.name, samples),
                **episode_metrics(samples, files.get(CALLS_FILE)),
                **failure_metrics(ended),
            },
            mean_lengths(samples),
            time.perf_counter() - began,
        )

    def close(self) -> None:
        """Return when all samples that were taken are durable. Raises StoreError where they cannot be."""
        self._log.close()


def open_shard(plan: ShardPlan, store_url: str, *, signs: bool) -> Shard:
    """Return the keeper of a shard, in the process of an engine. Raises KeeperRefused where this process cannot write
    as the driver does.

    Args:
        store_url: URL of the run's store.
        signs: whether the driver signs what it stores.
    """
    if signs != bool(os.environ.get(SIGNING_KEY)):
        raise KeeperRefused(f"{SIGNING_KEY} is not the driver's here")
    place = store_url, run_manifest(plan.run)
    try:
        store = reached(*place, layout.attempt(plan.run, plan.iteration, plan.step, plan.attempt))
        tokenizer = _tokenizer(plan.model, plan.tokenizer)
    except (StoreRefused, BadModel) as refused:
        raise KeeperRefused(f"on {gethostname()}: {refused}") from refused
    attempt = Attempt(store, plan.run, plan.iteration, plan.step, plan.shard, plan.attempt)
    return _StoringShard(place, plan, attempt, Snapshots(store), tokenizer)


class _StoringShard(Shard):
    """A shard in an engine's process, while the store takes its files. Where the store refuses one, a method raises
    EngineError, and the next attempt's samples go through the driver."""

    def __init__(self, place: tuple[str, str], *args: Any) -> None:
        self._place = place
        with self._storing():
            super().__init__(*args)

    def generate(self, engine: SampleSource) -> Iterator[Left | list[SampleEnd]]:
        with self._storing():
            yield from super().generate(engine)

    def finish(self, *args: Any, **kwargs: Any) -> ShardFiles:
        with self._storing():
            return super().finish(*args, **kwargs)

    def close(self) -> None:
        with self._storing():
            super().close()

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except StoreRefused as refused:
            _reached.pop(self._place, None)
            _refused[self._place] = time.monotonic(), str(refused)
            raise EngineError(f"the process on {gethostname()} cannot store its samples: {refused}") from refused


SIGNING_KEY = "CAIRN_SIGNING_KEY"
REFUSED_SECONDS = 60.0
"""Time for which a store that could not be used is not asked again: each attempt may wait for a connection."""
_refused: dict[tuple[str, str], tuple[float, str]] = {}
"""Stores that could not be used, each with the time of the last attempt and why."""
_reached: dict[tuple[str, str], Store] = {}


def reached(url: str, manifest: str, folder: str) -> Store:
    """Return the store at a URL, if it has the run's manifest and takes a file in the folder. Raises StoreRefused, and
    for a while again without asking the store."""
    place = url, manifest
    at, why = _refused.get(place, (-math.inf, ""))
    if time.monotonic() - at < REFUSED_SECONDS:
        raise StoreRefused(why)
    if place not in _reached:
        try:
            _reached[place] = _usable(url, manifest, folder)
        except StoreRefused as refused:
            _refused[place] = time.monotonic(), str(refused)
            raise
    return _reached[place]


def _usable(url: str, manifest: str, folder: str) -> Store:
    """Return the store at a URL. Raises StoreRefused where it takes no file, or lacks the manifest: it is another one,
    such as a folder of the same name on this machine."""
    store = open_store(url)
    store.check()
    if not store.exists(manifest):
        raise StoreRefused(f"{store.url} has no {manifest} there")
    probe = f"{folder}/{uuid4().hex}"
    store.write(probe, b"")
    store.delete(probe)
    return store


@cache
def _tokenizer(model: str, digest: str) -> Any:
    """Return the tokenizer of a model folder. Raises BadModel where it is not that of the digest."""
    tokenizer = load_tokenizer(model)
    if digest_of_tokenizer(tokenizer) != digest:
        raise BadModel(f"{model} has another tokenizer there than the run's")
    return tokenizer


@cache
def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return `tokenizer_digest`, computed once."""
    return tokenizer_digest(tokenizer)


def _continued(plan: ShardPlan, snapshots: Snapshots) -> Iterator[Group]:
    for commit, id in plan.continued:
        rows = snapshots.read(commit).filter(pc.field("group_id") == id)
        yield unfinished_group(rows, snapshots.images(commit), snapshots.calls(commit))


def shard_files(
    ended: pa.Table,
    groups: Mapping[int, Group],
    encode: Callable[[list[GeneratedSample]], pa.Table],
    calls: pa.Table | None,
) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Return all samples of a shard's groups (`whole_groups`), and the tables of its commit by file name.

    Args:
        ended: rows of the rollout table, for samples that ended or were aborted.
        encode: encodes samples as such rows.
        calls: rows of CALLS; None where nothing is recorded.
    """
    uncertain = {} if calls is None else uncertain_effects(calls)
    samples = without_unused(whole_groups(ended, groups, encode, uncertain))
    files = {"samples.parquet": samples.combine_chunks()}
    images = image_table(groups.values())
    if images is not None:
        files[IMAGES_FILE] = images
    return samples, files if calls is None else {**files, **call_tables(calls, samples)}


def whole_groups(
    samples: pa.Table,
    groups: Mapping[int, Group],
    encode: Callable[[list[GeneratedSample]], pa.Table],
    uncertain: Mapping[SampleKey, str],
) -> pa.Table:
    """Return all samples in their order. If one sample of a group failed, all of them fail: each with its own error,
    with its error in `uncertain` since it is not run again, or with the group's first error."""
    _, errors = finished_samples(samples)
    if errors:
        columns = (samples.column(name).to_pylist() for name in ("group_id", "sample_index", "error"))
        own = {(id, index): error for id, index, error in zip(*columns, strict=True) if error is not None}
        failed = [sample for id, error in errors.items() for sample in groups[id].failed(error, {**uncertain, **own})]
        others = pc.invert(pc.is_in(samples.column("group_id"), pa.array(errors, pa.int64())))
        samples = pa.concat_tables([samples.filter(others), encode(failed)])
    return samples.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def _input_tokens(samples: pa.Table, groups: Mapping[int, Group], cut_tokens: int | None) -> int:
    """Return the input tokens of all calls of the samples that got tokens in this shard, with one prefill per round."""
    names = ["group_id", "sample_index", "segments", TRAJECTORIES.name, TRAJECTORY_PROMPTS.name]
    columns = [column.to_pylist() for column in with_optional(samples, names).columns]
    lengths = [pc.list_value_length(samples.column(name)).to_pylist() for name in ("prompt_ids", "response_ids")]
    total = 0
    for group_id, index, segments, trajectories, own, prompt, response in zip(*columns, *lengths, strict=True):
        carried = groups[group_id].carried_tokens(index)
        if response > carried:
            starts = zip((0, *accumulate(trajectories or ())), own or repeat(None), strict=False)
            prompts = {at: prompt if ids is None else len(ids) for at, ids in starts}
            calls, start, end, before = dict[str, int](), 0, 0, prompts[0]
            for segment in segments or ():
                if end in prompts:
                    start, before = end, prompts[end]
                if segment["call"]:
                    calls.setdefault(segment["call"], before + end - start)
                end += segment["tokens"]
            total += carried + sum(calls.values() or [before])
            more_rounds = _rounds_of(response - carried, cut_tokens) - 1
            total += more_rounds * (prompt + carried) + (cut_tokens or 0) * more_rounds * (more_rounds + 1) // 2
    return total


def retold_metrics(function: str, samples: pa.Table) -> dict[str, int]:
    """Return the number of tokens that the policy sampled, and how many of them a later prompt of user code encodes as
    other tokens. `function`: `rollout.custom_generate_function_path`; nothing is returned for a built-in one."""
    if "." not in function:
        return {}
    segments, retold = with_optional(samples, ["segments", RETOKENIZED.name]).columns
    lengths = pc.list_value_length(samples.column("response_ids")).to_pylist()
    sampled = 0
    for length, parts in zip(lengths, segments.to_pylist(), strict=True):
        sampled += length if parts is None else sum(one["tokens"] for one in parts if one["call"] is not None)
    return {"sampled_tokens": sampled, "retold_tokens": pc.sum(retold).as_py() or 0}


def token_count(samples: pa.Table, column: str) -> int:
    """Return the number of tokens in a list column."""
    return sum(len(chunk.flatten()) for chunk in samples.column(column).chunks)


def _rounds_of(new_tokens: int, cut_tokens: int | None) -> int:
    """Return the number of rounds in which a sample got `new_tokens`; 1 where nothing is cut."""
    return max(1, math.ceil(new_tokens / cut_tokens)) if cut_tokens is not None else 1


def _ended_rounds(samples: pa.Table, groups: Mapping[int, Group], cut_tokens: int) -> dict[int, int]:
    """Return by group the round in which the last of its ended samples ended. `samples`: their rows of the rollout
    table."""
    lengths = pc.list_value_length(samples.column("response_ids")).to_pylist()
    keys = zip(samples.column("group_id").to_pylist(), samples.column("sample_index").to_pylist(), strict=True)
    ended: dict[int, int] = {}
    for (group_id, index), length in zip(keys, lengths, strict=True):
        rounds = _rounds_of(length - groups[group_id].carried_tokens(index), cut_tokens)
        ended[group_id] = max(rounds, ended.get(group_id, 0))
    return ended
