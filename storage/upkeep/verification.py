"""Verification: reads a whole run again and compares it with its digests."""

import hashlib
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, repeat
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pyarrow.compute as pc
from pydantic import Field, JsonValue

from cairn.configs.engines import layout_changes
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, OutputFile, Step, parse_commit_name
from cairn.storage.ledger.decisions import Decision, RedactedFile, Redaction, read_decision, redacted_files
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.publications import base_of
from cairn.storage.ledger.redacted import Fault, Finding
from cairn.storage.ledger.schemas import TRAJECTORIES, TRAJECTORY_PROMPTS
from cairn.storage.ledger.shards import read_commits
from cairn.storage.ledger.snapshots import is_retired, read_table
from cairn.storage.ledger.terms import Terms, Upgrade
from cairn.storage.logs.admissions import Admitted, Claim, claimed_numbers, read_claim
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import REQUESTS, Store
from cairn.storage.upkeep.accounting import Accounting, GroupCounts, GroupTable, records_groups

# Check that the tokens of committed samples match their committed calls, even if several drivers made them.


SAMPLES_FILE = "samples.parquet"
_COLUMNS = (
    *("group_id", "sample_index", "prompt_ids", "response_ids", "segments"),
    *(TRAJECTORIES.name, TRAJECTORY_PROMPTS.name),
)


def mixed_histories(store: Store, commit: Commit) -> Iterator[Finding]:
    """Yield a finding for the first sample of a rollout with a segment that does not match its calls, if there is
    one."""
    files = {output.path.rpartition("/")[2]: output for output in commit.outputs}
    if commit.step is not Step.ROLLOUT or not files.keys() >= {SAMPLES_FILE, layout.CALLS_FILE}:
        return
    calls = _calls(store, commit.run, files[layout.CALLS_FILE])
    samples = read_table(store, commit.run, files[SAMPLES_FILE])
    for row in samples.select([name for name in _COLUMNS if name in samples.column_names]).to_pylist():
        key = row["group_id"], row["sample_index"]
        for call, before in _sampled_segments(row):
            recorded = calls.get((*key, call))
            if recorded is None or not _is_after(recorded, before):
                path = layout.in_run(commit.run, files[SAMPLES_FILE].path)
                problem = (
                    "is not recorded" if recorded is None else f"continued from other tokens than these {len(before)}"
                )
                message = f"{path} has sample {key[0]}/{key[1]}, whose policy call {call} {problem}"
                yield Finding(fault=Fault.CALLS_DIFFER, path=path, message=message)
                return


def _calls(store: Store, run: str, output: OutputFile) -> dict[tuple[int, int, str], dict[str, Any]]:
    """Return the policy's calls that have a response, by (group, sample, call)."""
    table = read_table(store, run, output)
    table = table.filter(pc.field("order").is_valid() & (pc.field("kind") == "sample"))
    rows = table.select(["group_id", "sample_index", "call", "given_tokens", "arguments"]).to_pylist()
    return {(row["group_id"], row["sample_index"], row["call"]): row for row in rows}


def _sampled_segments(row: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the call of each sampled segment, and the tokens before the segment in its trajectory."""
    lengths = row.get(TRAJECTORIES.name) or [len(row["response_ids"])]
    prompts = row.get(TRAJECTORY_PROMPTS.name) or repeat(None)
    begins = dict(zip((0, *accumulate(lengths)), prompts, strict=False))
    prompt, start, place = row["prompt_ids"], 0, 0
    for segment in row["segments"] or ():
        if place in begins:
            prompt, start = begins[place] or row["prompt_ids"], place
        if segment["call"] is not None:
            yield segment["call"], [*prompt, *row["response_ids"][start:place]]
        place += segment["tokens"]


def _is_after(recorded: Mapping[str, Any], before: Sequence[int]) -> bool:
    """Return whether a recorded call continued from the tokens `before`.

    Earlier versions of the code recorded only the number of these tokens.
    """
    if recorded["arguments"] is None:
        return bool(recorded["given_tokens"] == len(before))
    sha256 = hashlib.sha256(np.asarray(before, np.int32).tobytes())
    return bool(recorded["arguments"] == canonical.to_json({"sha256": sha256.hexdigest()}))


_RETIRED: Final = "retired"
_REDACTED: Final = "redacted"
_FileCheck = Finding | Literal["retired", "redacted"] | None
"""Result of reading a file again; None if it is as committed."""
_Redactions = Mapping[str, tuple[tuple[Decision, RedactedFile], ...]]
_GROUPS = "groups"
Item = TypeVar("Item")
_COMMIT_NAME = re.compile(r"\d{6}/")


class Verified(Record):
    """Result of checking one commit (or manifest, terms of an upgrade, decision, or claim of an admission) with its
    files. The last result of a run is the accounting of all groups."""

    name: str
    """`run.json`, `upgrades/000001.json`, `decisions/000001.json`, `stream/admissions/000000.json`, a commit such as
    `000042/rollout.00-000`, or `groups`."""
    files: int
    """Number of files read, including the marker."""
    bytes: int
    retired: int = 0
    """Number of files that retention removed."""
    redacted: int = 0
    """Number of files that differ from what was committed, as a redaction recorded."""
    findings: tuple[Finding, ...] = ()
    groups: GroupCounts | None = None
    """Counts of the groups; only for `groups`."""
    other_code: bool = False
    """Whether these terms are those of another version of the code than the terms before."""
    layout: dict[str, tuple[JsonValue, JsonValue]] = Field(default_factory=dict)
    """Options of the layout of ranks and engines whose value differs from the terms before: that value, and the new
    one."""

    @property
    def is_commit(self) -> bool:
        """Whether this is the result of a commit."""
        return _COMMIT_NAME.match(self.name) is not None


def counts(checks: Sequence[Verified]) -> dict[str, int]:
    """Return the numbers of commits, decisions and files that were checked and of their bytes, and how often the
    version of the code and the layout changed."""
    return {
        "commits": sum(check.is_commit for check in checks),
        "upgrades": sum(check.other_code for check in checks),
        "layouts": sum(bool(check.layout) for check in checks),
        "decisions": sum(check.name.startswith("decisions/") for check in checks),
        **{name: sum(getattr(check, name) for check in checks) for name in ("files", "bytes", "retired", "redacted")},
    }


def verify(ledger: Ledger) -> Iterator[Verified]:
    """Verify every marker and every committed file of a run, in the order of iterations.

    Compares them with their digests, and each commit's inputs with the commits that they name. For a fork this includes
    what it shares with its parent. Accounts for every group (`cairn.storage.upkeep.accounting`). Yields each result as
    it is checked; reads everything, changes nothing.
    """
    store = ledger.store
    manifest = layout.run_manifest(ledger.run)
    yield _verify_sealed("run.json", manifest, store.read(manifest))
    yield from _verify_upgrades(ledger)
    yield from _verify_decisions(ledger)
    claims: list[Claim] = []
    yield from _verify_claims(ledger, claims)
    digests: dict[str, str] = {}
    redactions = _redactions(ledger)
    with ThreadPoolExecutor(REQUESTS) as readers:
        accounting, contradictions = Accounting(store, readers), list[Finding]()
        # Newest first: a running driver commits inputs before the commits made from them.
        markers = [(iteration, ledger.markers(iteration)) for iteration in reversed(ledger.iterations())]
        history = _read_all(store, reversed(markers), readers, digests)
        admitted = Admitted(claims)
        for iteration, commits in _ahead(ledger.lag, history):
            tables: list[GroupTable] = []
            seen = set[str]()
            for commit in commits:
                if isinstance(commit, Finding):
                    yield Verified(name=_name(commit.path), files=1, bytes=0, findings=(commit,))
                    continue
                files = [layout.in_run(commit.run, output.path) for output in commit.outputs]
                own = commit.run, redactions[commit.run]
                checks = list(readers.map(verify_file, repeat(store), files, commit.outputs, *map(repeat, own)))
                present = [output for output, check in zip(commit.outputs, checks, strict=True) if check != _RETIRED]
                admitted.take(commit)
                _read_late_admissions(ledger, commit, digests, admitted)
                tables += _group_tables(commit, checks, redactions[commit.run])
                own_file = commit.path not in seen
                seen.add(commit.path)
                yield Verified(
                    name=commit.name,
                    files=own_file + len(present),
                    bytes=len(commit.to_bytes()) + sum(output.bytes for output in present),
                    retired=len(checks) - len(present),
                    redacted=checks.count(_REDACTED),
                    findings=(
                        *(check for check in checks if isinstance(check, Finding)),
                        *_verify_terms(ledger, commit),
                        *_verify_inputs(commit, digests),
                        *_verify_base(ledger, commit),
                        *(() if any(checks) else mixed_histories(store, commit)),
                    ),
                )
            damaged = [_name(commit.path) for commit in commits if isinstance(commit, Finding)]
            whole = not any(records_groups(name) for name in damaged)
            contradictions += accounting.take(iteration, tables, whole=whole)
        contradictions += admitted.findings()
    groups = accounting.groups()
    groups = groups.model_copy(update={"open": groups.open + admitted.open()})
    yield Verified(name=_GROUPS, files=0, bytes=0, findings=tuple(contradictions), groups=groups)


def _read_late_admissions(ledger: Ledger, commit: Commit, digests: dict[str, str], admitted: Admitted) -> None:
    """Read admissions from which a commit was made and that did not exist when their iteration was listed.

    The admissions of a stream can be in later iterations than the commit.
    """
    for name in commit.inputs.keys() - digests.keys():
        if f"/{Step.ADMIT}." in name and (admission := ledger.find(*parse_commit_name(name))) is not None:
            digests[name] = admission.digest
            admitted.take(admission)


def _read_all(
    store: Store, markers: Iterable[tuple[int, list[str]]], readers: ThreadPoolExecutor, digests: dict[str, str]
) -> Iterator[tuple[int, list[Commit | Finding]]]:
    """Yield the commits of each iteration, with a finding for each file that cannot be read, and add the commits'
    digests to `digests` by name."""
    for iteration, paths in markers:
        read = readers.map(lambda path: _read_commits(store, path), paths)
        commits: list[Commit | Finding] = []
        held: dict[tuple[str, str], str] = {}
        """Digest of each commit, by its path and name."""
        without = set[str]()
        """Paths of files that are damaged or missing."""
        for path, found in zip(paths, read, strict=True):
            for one in found:
                if isinstance(one, Finding):
                    commits.append(one)
                    without.add(path)
                    continue
                place = one.path, one.name
                if one.path == path or (one.path not in paths and place not in held):
                    commits.append(one)
                    held[place] = one.digest
                    if one.path not in paths and one.path not in without and not store.exists(one.path):
                        message = f"{one.path} is missing, and {path} repeats its commits"
                        commits.append(Finding(fault=Fault.MISSING, path=one.path, message=message))
                        without.add(one.path)
                elif one.path not in without and held.get(place) != one.digest:
                    message = f"{one.name} is another commit there than in {one.path}"
                    commits.append(Finding(fault=Fault.UNREADABLE, path=path, message=message))
        digests |= {one.name: one.digest for one in commits if isinstance(one, Commit)}
        yield iteration, commits


def _ahead(count: int, items: Iterator[Item]) -> Iterator[Item]:
    """Yield each item after `count` more have been read.

    An earlier iteration may take what a stream admitted in a later one.
    """
    waiting: deque[Item] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _name(path: str) -> str:
    return path.partition("/iterations/")[2].removesuffix(".json")


def _verify_upgrades(ledger: Ledger) -> Iterator[Verified]:
    before: Terms | None = ledger.manifest
    for number in itertools.count(1):
        path = layout.upgrade(ledger.run, number)
        try:
            data = ledger.store.read(path)
        except FileNotFoundError:
            return
        checked = _verify_sealed(path.removeprefix(f"{layout.run(ledger.run)}/"), path, data)
        after: Upgrade | None = None
        changes: dict[str, Any] = {"other_code": True}
        with suppress(ValueError):
            after = Upgrade.from_bytes(data)
        if before is not None and after is not None:
            changes = {"other_code": before.is_other_code(after), "layout": layout_changes(before.config, after.config)}
        yield checked.model_copy(update=changes)
        before = after


def _verify_decisions(ledger: Ledger) -> Iterator[Verified]:
    """Verify each decision, and that each names the digest of the one before."""
    store, run = ledger.store, ledger.run
    numbers = layout.numbers(store.list(layout.decisions(run)))
    before: str | None = None
    for number in range(1, max(numbers, default=0) + 1):
        path = layout.decision(run, number)
        files, size, fault, message = 1, 0, None, ""
        try:
            data = store.read(path)
            decision = read_decision(data, path)
            size = len(data)
            if decision.previous != before:
                fault = Fault.INPUT_DIFFERS
                message = (
                    f"{path} follows a decision with digest {decision.previous}, but the one before it has {before}"
                )
            before = decision.digest
        except FileNotFoundError:
            files, fault, message = 0, Fault.MISSING, f"{path} is missing, although later ones exist"
        except Damaged as error:
            fault, message = Fault.UNREADABLE, str(error)
        findings = () if fault is None else (Finding(fault=fault, path=path, message=message),)
        yield Verified(name=f"decisions/{number:06d}.json", files=files, bytes=size, findings=findings)


def _verify_claims(ledger: Ledger, claims: list[Claim]) -> Iterator[Verified]:
    """Verify each claim of an admission, and add those that can be read to `claims`."""
    for number in claimed_numbers(ledger.store, ledger.run):
        path = layout.admission(ledger.run, number)
        name, data = path.removeprefix(f"{layout.run(ledger.run)}/"), ledger.store.read(path)
        findings = []
        try:
            claims.append(read_claim(data, path))
        except Damaged as error:
            findings.append(Finding(fault=Fault.UNREADABLE, path=path, message=str(error)))
        yield Verified(name=name, files=1, bytes=len(data), findings=tuple(findings))


def _verify_sealed(name: str, path: str, data: bytes) -> Verified:
    findings = []
    try:
        canonical.unseal(data)
    except ValueError as error:
        findings.append(Finding(fault=Fault.UNREADABLE, path=path, message=f"{path} cannot be trusted: {error}"))
    return Verified(name=name, files=1, bytes=len(data), findings=tuple(findings))


def _verify_terms(ledger: Ledger, commit: Commit) -> Iterator[Finding]:
    try:
        ledger.terms_of(commit)
    except Damaged as error:
        path = layout.upgrade(commit.run, commit.terms)
        yield Finding(fault=Fault.MISSING, path=path, message=str(error))


def _verify_base(ledger: Ledger, commit: Commit) -> Iterator[Finding]:
    """Yield a finding where stored weights are a difference to another commit than the ledger has."""
    if commit.step is Step.SYNC:
        try:
            base_of(ledger.find, commit)
        except Damaged as error:
            yield Finding(fault=Fault.INPUT_DIFFERS, path=commit.path, message=str(error))


def _read_commits(store: Store, path: str) -> Sequence[Commit | Finding]:
    try:
        return read_commits(store.read(path), path)
    except Damaged as error:
        return [Finding(fault=Fault.UNREADABLE, path=path, message=str(error))]


def _redactions(ledger: Ledger | None) -> dict[str, _Redactions]:
    """Return the redactions of a run and of its parents, by the runs' names.

    Ignores damaged decisions, which are findings of their own.
    """
    redactions: dict[str, _Redactions] = {}
    while ledger is not None:
        try:
            redactions[ledger.run] = redacted_files(ledger.decisions.all())
        except Damaged:
            redactions[ledger.run] = {}
        ledger = ledger.parent
    return redactions


def verify_file(
    store: Store, path: str, output: OutputFile, run: str | None = None, redactions: _Redactions | None = None
) -> _FileCheck:
    """Compare a committed file with its digest. `run`: the run that may have retired it; None for another file.
    `redactions`: those of the run."""
    expected = f"expected {output.bytes} bytes with sha256 {output.sha256}"
    try:
        size, sha256 = store.sha256(path)
    except FileNotFoundError:
        if run is not None and is_retired(store, run, path):
            return _RETIRED
        return Finding(fault=Fault.MISSING, path=path, message=f"{path} is missing: {expected}")
    if versions := (redactions or {}).get(output.path):
        decision, redacted = versions[-1]
        if sha256 == redacted.new_sha256:
            return _REDACTED
        if sha256 in {output.sha256, *(file.new_sha256 for _, file in versions)}:
            assert isinstance(decision.what, Redaction)
            message = (
                f"{path} still holds text that decision {decision.number} redacts: run cairn delete {run} --prompt "
                f"{decision.what.prompt} to finish"
            )
            return Finding(fault=Fault.UNREDACTED, path=path, message=message)
        expected = f"expected {redacted.new_bytes} bytes with sha256 {redacted.new_sha256} since it was redacted"
    elif (size, sha256) == (output.bytes, output.sha256):
        return None
    message = f"{path} is altered: {expected}, found {size} bytes with sha256 {sha256}"
    return Finding(fault=Fault.ALTERED, path=path, message=message)


def _group_tables(commit: Commit, checks: Sequence[_FileCheck], redactions: _Redactions) -> Iterator[GroupTable]:
    """Yield the tables of a commit that record groups, each with the result of reading its file."""
    for output, check in zip(commit.outputs, checks, strict=True) if records_groups(commit.name) else ():
        if output in commit.tables:
            versions = redactions.get(output.path, ())
            yield GroupTable(
                commit,
                layout.in_run(commit.run, output.path),
                versions[-1][1].new_bytes if versions else output.bytes,
                unread="retired" if check == _RETIRED else "unreadable" if isinstance(check, Finding) else None,
            )


def _verify_inputs(commit: Commit, digests: dict[str, str]) -> Iterator[Finding]:
    for name, digest in commit.inputs.items():
        if not _COMMIT_NAME.match(name):
            continue
        made_from = f"{commit.name} was made from {name} with digest {digest}"
        if name not in digests:
            yield Finding(fault=Fault.INPUT_MISSING, path=commit.path, message=f"{made_from}, which cannot be read")
        elif digests[name] != digest:
            message = f"{made_from}, which now has digest {digests[name]}"
            yield Finding(fault=Fault.INPUT_DIFFERS, path=commit.path, message=message)
