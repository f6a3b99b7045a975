"""`bundle`: one file with everything that one sample came from and went into.

```
bundle.json                      sealed: which sample, its grader's input, the bundle's contents
store/runs/<run>/run.json        the ledger's own files, byte for byte, where the store has them: manifests, upgrades,
store/runs/<run>/decisions/…     decisions, signatures,
store/runs/<run>/iterations/…    the commits from which the sample came and into which it went, back to the first, and
                                 the whole tables of its own steps: digests can only be checked for whole tables
grader/<file>.py                 source of a custom grader, where its digest is that of the grader that graded
```
`cairn.flows.export.unbundle` reads it on any machine.
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

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.lineage import sample_row
from cairn.flows.reading.samples import SampleView, iteration_samples
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step, parse_commit_name
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import TRAJECTORIES
from cairn.storage.ledger.shards import read_commits
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.signed import signature_path
from cairn.storage.upkeep.retention import newest_checkpoint

FORMAT = 1
CONTENTS = "bundle.json"
STORE = "store"
GRADER = "grader"
_SAMPLE_STEPS = (Step.ROLLOUT, Step.REWARD, Step.FILTER, Step.SCORE, Step.ADVANTAGE)
"""Steps whose tables with the sample are included."""


class Contents(Record):
    """Description of a bundle, stored in it."""

    format: int = FORMAT
    run: str
    iteration: int
    sample: int
    """Number of the sample in the iteration, in the order of `cairn show`."""
    group_id: int
    sample_index: int
    generated_in: int
    rollout: str
    """Name of the commit with the sample's rows."""
    newest: str
    newest_digest: str
    """Digest of the newest commit that came from the sample: a reader with this digest from another source can verify
    the whole bundle."""
    given: dict[str, Any] | None
    """Input of the sample's grader; None where the model's tokenizer was unavailable, or the sample has several
    trajectories."""
    grader: str | None
    """Name of the source file in `grader/`; None for a built-in grader, or where the source was unavailable."""
    checkpoint: str | None
    """Name of the commit of the included weights."""
    made_at: float


def bundle(ledger: Ledger, iteration: int, number: int, file: Path, *, weights: bool = False) -> Contents:
    """Write the bundle of sample `number` of an iteration to a new file.

    `weights`: include the newest checkpoint at or before the weights that sampled it. Raises LookupError if there is no
    such sample, FileExistsError, Retired where its tables are not retained, and Damaged.
    """
    ledger.manifest.require_own("history of a sample before its response")
    views = iteration_samples(ledger, iteration)
    if number >= len(views):
        raise LookupError(
            f"iteration {iteration} of run {ledger.run!r} has samples 0 to {len(views) - 1}, not {number}"
        )
    view = views[number]
    config = from_manifest(ledger.owner(view.iteration).manifest.config)
    rollout = ledger.find(view.iteration, Step.ROLLOUT, view.shard)
    assert rollout is not None
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
        given=_grader_input(config, ledger, rollout, view),
        grader=grader,
        checkpoint=None if saved is None else saved.name,
        made_at=time.time(),
    )
    if saved is not None:
        chain |= {commit.name: commit for commit in _back_from(ledger, [saved])}
    with ZipFile(file, "x", ZIP_DEFLATED) as opened:
        try:
            opened.writestr(CONTENTS, canonical.seal(contents.model_dump(mode="json")))
            for path in sorted({*_run_files(ledger), *(commit.path for commit in chain.values())}):
                _add_sealed(opened, ledger, path)
            for commit in [rollout, *uses, *([saved] if saved else [])]:
                if commit.step in _SAMPLE_STEPS or commit is saved:
                    _add_outputs(opened, ledger, commit)
            if grader is not None:
                opened.writestr(f"{GRADER}/{grader}", source)
        except BaseException:  # no partial bundle stays
            file.unlink()
            raise
    return contents


def _uses(ledger: Ledger, view: SampleView, rollout: Commit, iteration: int) -> list[Commit]:
    """Return the commits that used or graded a sample, up to an iteration."""
    graded = ledger.find(view.iteration, Step.REWARD, rollout.shard)
    uses = [] if graded is None else [graded]
    for index in range(view.iteration, iteration + 1):
        commits = ledger.commits(index)
        uses += [commit for commit in commits if commit.step is Step.FILTER]
        if index == iteration:
            later = (Step.SCORE, Step.ADVANTAGE, Step.TRAIN, Step.CHECKPOINT, Step.SYNC)
            uses += [commit for commit in commits if commit.step in later]
    return uses


def _back_from(ledger: Ledger, commits: Iterable[Commit]) -> Iterator[Commit]:
    """Yield the commits and all their transitive inputs. A record is included with all commits that it holds."""
    pending, seen, files = list(commits), set[str](), set[str]()
    while pending:
        commit = pending.pop()
        if commit.name in seen:
            continue
        seen.add(commit.name)
        yield commit
        if layout.parse_record(commit.path.rpartition("/")[2]) is not None and commit.path not in files:
            files.add(commit.path)
            pending += read_commits(ledger.store.read(commit.path), commit.path)
        for name in commit.inputs:
            iteration, slash, _ = name.partition("/")
            if slash and iteration.isdecimal() and name not in seen:
                source = ledger.find(*parse_commit_name(name))
                pending += [] if source is None else [source]


def _run_files(ledger: Ledger) -> Iterator[str]:
    """Yield store paths of manifests, upgrades and decisions of a run and its parents."""
    owner: Ledger | None = ledger
    while owner is not None:
        yield layout.run_manifest(owner.run)
        for folder in (layout.upgrades(owner.run), layout.decisions(owner.run)):
            yield from (f"{folder}/{name}" for name in ledger.store.list(folder) if name.endswith(".json"))
        owner = owner.parent


def _add_sealed(opened: ZipFile, ledger: Ledger, path: str) -> None:
    """Add a file of the ledger, and its signature if it has one."""
    data = ledger.store.read(path)
    opened.writestr(f"{STORE}/{path}", data)
    signature = signature_path(path, data)
    if ledger.store.exists(signature):
        opened.writestr(f"{STORE}/{signature}", ledger.store.read(signature))


def _add_outputs(opened: ZipFile, ledger: Ledger, commit: Commit) -> None:
    with TemporaryDirectory(prefix="cairn-bundle-") as folder:
        for output in commit.outputs:
            path, local = layout.in_run(commit.run, output.path), Path(folder) / "file"
            ledger.store.get_file(path, local)
            opened.write(local, f"{STORE}/{path}")
            os.unlink(local)


def _grader_input(config: RunConfig, ledger: Ledger, rollout: Commit, view: SampleView) -> dict[str, Any] | None:
    """Return the input of the sample's grader."""
    from cairn.engines.models.tokenizers import load_tokenizer
    from cairn.tasks.grading.reward import grader_samples

    row = sample_row(ledger, rollout, (view.group_id, view.sample_index))
    assert row is not None
    if row.get(TRAJECTORIES.name) is not None or not Path(config.model.path).is_dir():
        return None
    row["metadata"] = from_json(row["metadata"] or "{}")
    columns = {name: [value] for name, value in {**row, TRAJECTORIES.name: None}.items()}
    whole: Any = SimpleNamespace(sees_whole_samples=True, sees_messages=False)
    (sample,) = grader_samples(whole, load_tokenizer(config.model.path), columns)
    return dataclasses.asdict(sample)


def _grader(config: RunConfig, ledger: Ledger, rollout: Commit, view: SampleView) -> tuple[str | None, bytes]:
    """Return name and source of a custom grader, where the available source is the one that graded."""
    from cairn.configs.plugins import BadPlugin
    from cairn.flows.driver.trust import code_at_hand
    from cairn.tasks.durable.plugin_sources import source_digest, source_files

    named = config.reward.custom_rm_path
    path = None if named is None else code_at_hand(named, ledger.store)
    graded = ledger.find(view.iteration, Step.REWARD, rollout.shard)
    row = None if graded is None else sample_row(ledger, graded, (view.group_id, view.sample_index))
    if path is None or row is None or ".py:" not in path:
        return None, b""
    try:
        files = source_files(path)
        same = len(files) == 1 and source_digest(path)[:16] == row["grader_version"]
    except BadPlugin:
        return None, b""
    (source,) = list(files.values())[:1]
    return (source.name, source.read_bytes()) if same else (None, b"")
