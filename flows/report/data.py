"""What a report tells, read from the ledger: commits as iterations, and samples as rows with what became of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.loader import from_manifest
from cairn.flows.metrics import eval_metrics, iteration_metrics, step_seconds
from cairn.storage.commits import Commit, Step, newest_selection
from cairn.storage.errors import Retired
from cairn.storage.ledger import Ledger
from cairn.storage.snapshots import read_table

_READERS = 4
"""Files read at a time."""
_KEYS = ["group_id", "sample_index"]
Progress = Callable[[str, int, int], None]
"""(what is being done, done, of so many)"""


@dataclass(frozen=True)
class Iteration:
    """One iteration, as its commits tell it. Times are Unix seconds."""

    number: int
    metrics: Mapping[str, float]
    seconds: Mapping[Step, float]
    """In which at least one shard of a step was at work."""
    began_at: float
    ended_at: float


@dataclass
class History:
    """A run's iterations and evaluations, in their order."""

    iterations: list[Iteration] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by the number of iterations that the evaluated weights were trained for."""
    sources: list[tuple[list[Commit], Commit | None, list[Commit]]] = field(default_factory=list)
    """Of each iteration: commits of rollout and reward, of the last round of filter, of score and advantage."""
    machines: dict[tuple[str, str, int], set[Step]] = field(default_factory=dict)
    """(device, host, threads) → what ran there."""


def read_history(ledger: Ledger, tell: Progress) -> History:
    """Read every commit of a run. Raises Damaged."""
    config = from_manifest(ledger.manifest.config)
    history, evaluations = History(), []
    numbers = ledger.iterations()
    with ThreadPoolExecutor(_READERS) as readers:
        for done, (number, commits) in enumerate(zip(numbers, readers.map(ledger.commits, numbers), strict=True), 1):
            tell("reading commits", done, len(numbers))
            if not commits:
                continue
            for commit in commits:
                place = commit.environment
                history.machines.setdefault((place.device, place.host or "", place.threads), set()).add(commit.step)
            evaluations += [commit for commit in commits if commit.step is Step.EVAL]
            of_samples = [commit for commit in commits if commit.step in (Step.ROLLOUT, Step.REWARD)]
            of_tokens = [commit for commit in commits if commit.step in (Step.SCORE, Step.ADVANTAGE)]
            history.sources.append((of_samples, newest_selection(commits), of_tokens))
            own = [commit for commit in commits if commit.step is not Step.EVAL]
            if own:
                history.iterations.append(
                    Iteration(
                        number,
                        iteration_metrics(own, config),
                        step_seconds(commits),
                        min(commit.started_at for commit in own),
                        max(commit.committed_at for commit in own),
                    )
                )
    history.evaluations = dict(sorted(eval_metrics(evaluations).items()))
    return history


@dataclass(frozen=True)
class Samples:
    """Every sample of a run once, by iteration and group."""

    rows: pa.Table
    """See `_COLUMNS`."""
    retired: int = 0
    """Files of samples that the run does not keep any more."""


_COLUMNS = pa.schema(
    [
        ("iteration", pa.int32()),  # in which it was generated, or finished
        ("group_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("prompt", pa.large_string()),
        ("response", pa.large_string()),
        ("label", pa.large_string()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("segments", pa.int32()),
        ("log_prob", pa.float32()),  # mean of the tokens that the policy sampled
        ("finish_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.large_string()),
        ("seconds", pa.float32()),
        ("reward", pa.float32()),
        ("fate", pa.string()),  # Disposition
        ("reason", pa.string()),
        ("advantage", pa.float32()),  # mean of its tokens
        ("age", pa.int32()),  # of its oldest trained token
    ]
)


def read_samples(ledger: Ledger, history: History, tell: Progress) -> Samples:
    """Read every sample of a run. Raises Damaged."""
    read_of: dict[Step, list[pa.Table]] = {step: [] for step in _OF}
    retired = 0
    with ThreadPoolExecutor(_READERS) as readers:
        read = readers.map(lambda source: list(_read_source(ledger, *source)), history.sources)
        for done, tables in enumerate(read, 1):
            tell("reading samples", done, len(history.sources))
            for step, table in tables:
                if table is None:
                    retired += 1
                else:
                    read_of[step].append(table)
    rows = _newest(read_of[Step.ROLLOUT], _KEYS)
    if rows is None:
        return Samples(_COLUMNS.empty_table(), retired)
    rows = _joined(rows, _newest(read_of[Step.REWARD], _KEYS), _KEYS)
    rows = _joined(rows, _newest(read_of[Step.FILTER], ["group_id"]), ["group_id"])
    rows = _joined(rows, _newest(read_of[Step.ADVANTAGE], _KEYS), _KEYS)
    if "graded" in rows.column_names:  # what failed to be graded was generated
        graded = [pc.coalesce(rows.column(of), rows.column(name)) for of, name in _GRADED.items()]
        for name, column in zip(_GRADED.values(), graded, strict=True):
            rows = rows.set_column(rows.column_names.index(name), name, column)
    rows = rows.sort_by([("iteration", "ascending"), ("group_id", "ascending"), ("sample_index", "ascending")])
    columns = [
        rows.column(column.name).cast(column.type)
        if column.name in rows.column_names
        else pa.nulls(rows.num_rows, column.type)
        for column in _COLUMNS
    ]
    return Samples(pa.table(columns, schema=_COLUMNS), retired)


_GRADED = {"graded": "status", "not_graded": "error"}
"""What the reward step says of a sample → what the rollout step says of it."""


def _read_source(
    ledger: Ledger, of_samples: Sequence[Commit], selection: Commit | None, of_tokens: Sequence[Commit]
) -> Iterator[tuple[Step, pa.Table | None]]:
    """What an iteration's commits hold, a row a sample or group; None in place of a table that is retired."""
    for commit in [*of_samples, *([selection] if selection else []), *of_tokens]:
        if commit.step is Step.SCORE:
            continue
        try:
            table = read_file(ledger, commit)
        except Retired:
            yield commit.step, None
            continue
        yield commit.step, _OF[commit.step](table, commit.iteration)


def _generated(table: pa.Table, iteration: int) -> pa.Table:
    mask = list_values(table.column("loss_mask"))
    n = table.num_rows
    segments = pc.coalesce(pc.list_value_length(table.column("segments")), pa.scalar(1, pa.int32()))
    return pa.table(
        {
            "group_id": table.column("group_id"),
            "sample_index": table.column("sample_index"),
            "iteration": pa.array(np.full(n, iteration, np.int32)),
            "prompt": table.column("prompt_text").cast(pa.large_string()),
            "response": table.column("response_text").cast(pa.large_string()),
            "label": table.column("label").cast(pa.large_string()),
            "prompt_tokens": pc.list_value_length(table.column("prompt_ids")),
            "response_tokens": pc.list_value_length(table.column("response_ids")),
            "segments": segments,
            "log_prob": pa.array(list_means(table.column("log_probs"), mask), from_pandas=True),
            "finish_reason": table.column("finish_reason"),
            "status": table.column("status"),
            "error": table.column("error").cast(pa.large_string()),
            "seconds": table.column("seconds"),
        }
    )


def _graded(table: pa.Table, _: int) -> pa.Table:
    return pa.table(
        {
            "group_id": table.column("group_id"),
            "sample_index": table.column("sample_index"),
            "reward": table.column("reward"),
            "graded": table.column("status"),
            "not_graded": table.column("error").cast(pa.large_string()),
        }
    )


def _selected(table: pa.Table, _: int) -> pa.Table:
    return pa.table(
        {
            "group_id": table.column("group_id"),
            "fate": table.column("disposition"),
            "reason": table.column("reason"),
        }
    )


def _advantaged(table: pa.Table, _: int) -> pa.Table:
    ages = [max(ages, default=None) if ages else None for ages in table.column("ages").to_pylist()]
    return pa.table(
        {
            "group_id": table.column("group_id"),
            "sample_index": table.column("sample_index"),
            "advantage": pa.array(list_means(table.column("advantages")), from_pandas=True),
            "age": pa.array(ages, pa.int32()),
        }
    )


_OF: dict[Step, Callable[[pa.Table, int], pa.Table]] = {
    Step.ROLLOUT: _generated,
    Step.REWARD: _graded,
    Step.FILTER: _selected,
    Step.ADVANTAGE: _advantaged,
}


def read_file(ledger: Ledger, commit: Commit) -> pa.Table:
    """The one table of a commit. Raises Damaged and Retired."""
    (output,) = commit.outputs
    return read_table(ledger.store, commit.run, output)


def list_values(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column as all values one after the other, and where each row's begin; null is as empty."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    begin = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=begin[1:])
    return pc.list_flatten(column).to_numpy(zero_copy_only=False), begin


def list_means(column: pa.ChunkedArray, mask: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """Mean of each row's values, of those with a nonzero mask if there is one; NaN of none."""
    values, begin = list_values(column)
    weights = np.ones(len(values)) if mask is None else (mask[0] != 0).astype(np.float64)
    totals = [np.concatenate([[0.0], np.cumsum(v)]) for v in (values * weights, weights)]
    sums, counts = (total[begin[1:]] - total[begin[:-1]] for total in totals)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0).astype(np.float32)


def _newest(tables: Sequence[pa.Table], keys: Sequence[str]) -> pa.Table | None:
    """All rows, of several with the same keys the last."""
    if not tables:
        return None
    whole = pa.concat_tables(tables)
    whole = whole.append_column("row", pa.array(np.arange(whole.num_rows)))
    last = whole.select([*keys, "row"]).group_by(keys).aggregate([("row", "max")]).column("row_max")
    return whole.take(pc.take(last, pc.sort_indices(last))).drop_columns(["row"])


def _joined(rows: pa.Table, more: pa.Table | None, keys: list[str]) -> pa.Table:
    if more is None:
        return rows
    place = pa.table({**{key: more.column(key) for key in keys}, "row": pa.array(np.arange(more.num_rows))})
    wanted = rows.select(keys).append_column("at", pa.array(np.arange(rows.num_rows)))
    found = wanted.join(place, keys, join_type="left outer").sort_by("at").column("row")
    for name in more.column_names:
        if name not in keys:
            rows = rows.append_column(name, more.column(name).take(found))
    return rows
