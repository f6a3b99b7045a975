"""`bundle`: one file with everything that one sample came from and went into.

```
bundle.json                      sealed: which sample, what its grader was given, what lies here
store/runs/<run>/run.json        the ledger's own files, byte for byte, where the store has them: manifests, upgrades,
store/runs/<run>/decisions/…     decisions, signatures,
store/runs/<run>/iterations/…    the commits from which the sample came and into which it went, back to the first, and
                                 the whole tables of its own steps: only whole ones can be held against their digests
grader/<file>.py                 the source of a grader of one's own, where its digest is the one that graded
```
`cairn.flows.export.unbundle` reads it anywhere.
"""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pyarrow.compute as pc

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.samples import SampleView, iteration_samples
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import TRAJECTORIES
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.signed import signature_path
from cairn.storage.upkeep.retention import newest_checkpoint

FORMAT = 1
CONTENTS = "bundle.json"
STORE = "store"
GRADER = "grader"
_ITS_OWN = (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.SCORE, Step.ADVANTAGE)
"""Steps of which the sample's tables are taken along."""


class Contents(Record):
    """What a bundle says of itself."""

    format: int = FORMAT
    run: str
    iteration: int
    sample: int
    """Its number in the iteration, as `cairn show` counts."""
    group_id: int
    sample_index: int
    generated_in: int
    rollout: str
    """Name of the commit that holds its rows."""
    newest: str
    newest_digest: str
    """Of the newest commit that came from it: whoever has it from elsewhere knows that all of this is true."""
    given: dict[str, Any] | None
    """What its grader was given; None where the model's tokenizer was not at hand, or it has several trajectories."""
    grader: str | None
    """Name of the source file in `grader/`; None for one of Cairn's own, or where its source is not at hand."""
    checkpoint: str | None
    """The commit of the weights that are in here."""
    made_at: float


def bundle(ledger: Ledger, iteration: int, number: int, file: Path, *, weights: bool = False) -> Contents:
    """Write the bundle of sample `number` of an iteration to a file that is not there yet. `weights`: with the newest
    checkpoint at or below the weights that sampled it. Raises LookupError if there is no such sample, FileExistsError,
    Retired where its tables are not kept, and Damaged."""
    views = iteration_samples(ledger, iteration)
    if number >= len(views):
        raise LookupError(f"iteration {iteration} of run {ledger.run!r} has samples 0 to {len(views) - 1}, no {number}")
    view = views[number]
    config = from_manifest(ledger.owner(view.iteration).manifest.config)
    rollout = _rollout_of(ledger, view)
    uses = _uses(ledger, view, rollout, iteration)
    chain = {commit.name: commit for commit in _back_from(ledger, [rollout, *uses])}
    saved = newest_checkpoint(ledger, view.iteration - 1 - ledger.lag) if weights and view.iteration else None
    grader, source = _grader(config, ledger, rollout, view)
    newest = max([rollout, *uses], key=lambda commit: commit.committed_at)
    contents = Contents(
        run=ledger.run,
        iteration=iteration,
        sample=number,
        group_id=view.group_id,
        sample_index=view.sample_index,
        generated_in=view.iteration,
        rollout=rollout.name,
        newest=newest.name,
        newest_digest=newest.digest,
        given=_given(config, ledger, rollout, view),
        grader=grader,
        checkpoint=None if saved is None else saved.name,
        made_at=time.time(),
    )
    if saved is not None:
        chain |= {commit.name: commit for commit in _back_from(ledger, [saved])}
    with ZipFile(file, "x", ZIP_DEFLATED) as opened:
        try:
            opened.writestr(CONTENTS, canonical.seal(contents.model_dump(mode="json")))
            for path in sorted({*_of_runs(ledger), *map(_marker, chain.values())}):
                _add_sealed(opened, ledger, path)
            for commit in [rollout, *uses, *([saved] if saved else [])]:
                if commit.step in _ITS_OWN or commit is saved:
                    _add_outputs(opened, ledger, commit)
            if grader is not None:
                opened.writestr(f"{GRADER}/{grader}", source)
        except BaseException:  # half of it is none
            file.unlink()
            raise
    return contents


def _rollout_of(ledger: Ledger, view: SampleView) -> Commit:
    for commit in ledger.commits(view.iteration):
        if commit.step is Step.ROLLOUT and sample_row(ledger, commit, view.group_id, view.sample_index) is not None:
            return commit
    raise LookupError(f"no rollout of iteration {view.iteration} holds group {view.group_id}")


def sample_row(ledger: Ledger, commit: Commit, group_id: int, sample_index: int) -> dict[str, Any] | None:
    """A sample's row in the only table of a commit."""
    table = read_table(ledger.store, commit.run, commit.table)
    found = table.filter(
        pc.and_(pc.equal(table.column("group_id"), group_id), pc.equal(table.column("sample_index"), sample_index))
    )
    return found.to_pylist()[0] if found.num_rows else None


def _uses(ledger: Ledger, view: SampleView, rollout: Commit, iteration: int) -> list[Commit]:
    """The commits that say what became of a sample, as far as an iteration."""
    graded = ledger.find(view.iteration, Step.REWARD, rollout.shard)
    found = [] if graded is None else [graded]
    for index in range(view.iteration, iteration + 1):
        commits = ledger.commits(index)
        found += [commit for commit in commits if commit.step is Step.FILTER]
        if index == iteration:
            later = (Step.SCORE, Step.ADVANTAGE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC)
            found += [commit for commit in commits if commit.step in later]
    return found


def _back_from(ledger: Ledger, commits: Iterable[Commit]) -> Iterator[Commit]:
    """The commits, and all that they were made from."""
    pending, seen = list(commits), set[str]()
    while pending:
        commit = pending.pop()
        if commit.name in seen:
            continue
        seen.add(commit.name)
        yield commit
        for name in commit.inputs:
            iteration, slash, rest = name.partition("/")
            if slash and iteration.isdecimal() and name not in seen:
                step, _, shard = rest.partition(".")
                found = ledger.find(int(iteration), Step(step), shard or None)
                pending += [] if found is None else [found]


def _of_runs(ledger: Ledger) -> Iterator[str]:
    """Store paths of what says what a run and its parents are, and what was decided about them."""
    owner: Ledger | None = ledger
    while owner is not None:
        yield layout.run_manifest(owner.run)
        for folder in (layout.upgrades(owner.run), layout.decisions(owner.run)):
            yield from (f"{folder}/{name}" for name in ledger.store.list(folder) if name.endswith(".json"))
        owner = owner.parent


def _marker(commit: Commit) -> str:
    return layout.commit(commit.run, commit.iteration, commit.step, commit.shard)


def _add_sealed(opened: ZipFile, ledger: Ledger, path: str) -> None:
    """A file of the ledger, and its signature if it has one."""
    data = ledger.store.read(path)
    opened.writestr(f"{STORE}/{path}", data)
    beside = signature_path(path, data)
    if ledger.store.exists(beside):
        opened.writestr(f"{STORE}/{beside}", ledger.store.read(beside))


def _add_outputs(opened: ZipFile, ledger: Ledger, commit: Commit) -> None:
    with TemporaryDirectory(prefix="cairn-bundle-") as folder:
        for output in commit.outputs:
            path, local = layout.in_run(commit.run, output.path), Path(folder) / "file"
            ledger.store.get_file(path, local)
            opened.write(local, f"{STORE}/{path}")
            os.unlink(local)


def _given(config: RunConfig, ledger: Ledger, rollout: Commit, view: SampleView) -> dict[str, Any] | None:
    """What the sample's grader was given."""
    from cairn.engines.models.tokenizers import load_tokenizer
    from cairn.tasks.grading.reward import given_samples

    row = sample_row(ledger, rollout, view.group_id, view.sample_index)
    assert row is not None
    if row.get(TRAJECTORIES.name) is not None or not Path(config.model.path).is_dir():
        return None
    row["metadata"] = from_json(row["metadata"] or "{}")
    columns = {name: [value] for name, value in {**row, TRAJECTORIES.name: None}.items()}
    whole: Any = SimpleNamespace(sees_whole_samples=True, sees_messages=False)
    (sample,) = given_samples(whole, load_tokenizer(config.model.path), columns)
    return dataclasses.asdict(sample)


def _grader(config: RunConfig, ledger: Ledger, rollout: Commit, view: SampleView) -> tuple[str | None, bytes]:
    """Name and source of a grader of one's own, where the source at hand is the one that graded."""
    from cairn.configs.plugins import BadPlugin
    from cairn.flows.driver.trust import code_at_hand
    from cairn.tasks.durable.plugin_sources import source_digest, source_files

    named = config.reward.custom_rm_path
    path = None if named is None else code_at_hand(named, ledger.store)
    graded = ledger.find(view.iteration, Step.REWARD, rollout.shard)
    row = None if graded is None else sample_row(ledger, graded, view.group_id, view.sample_index)
    if path is None or row is None or ".py:" not in path:
        return None, b""
    try:
        files = source_files(path)
        same = len(files) == 1 and source_digest(path)[:16] == row["grader_version"]
    except BadPlugin:
        return None, b""
    (source,) = list(files.values())[:1]
    return (source.name, source.read_bytes()) if same else (None, b"")
