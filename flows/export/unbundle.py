"""Reading a bundle on any machine, without its store: verify it, and compute the reward again.

| checked | against |
|---|---|
| content of each file of the ledger | the digest in it |
| the sample's tables, all of which are included, and the inputs of each commit | the digests in the commit |
| where the sample was generated, and which groups the iteration took | the iteration that the bundle names |
| the authors of the files, where signers are passed | the included signatures |
| the grader's input in the bundle | the row in the rollout's table |
| the reward from the same version of the grader now | the recorded reward |

If all checks pass, a bundle is consistent in itself. Only a signature proves that it belongs to the run that it names,
or the digest of its newest commit, compared with the one in `cairn status` or from another source.
"""

import shutil
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from pydantic import TypeAdapter, ValidationError

from cairn.configs.errors import Failure
from cairn.configs.loader import from_manifest
from cairn.flows.export.bundle import CONTENTS, FORMAT, GRADER, STORE, Contents
from cairn.flows.reading.lineage import sample_row
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step, newest_selection, parse_commit_name
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_bytes, read_table
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import LONGEST_RECORD, check_path
from cairn.storage.upkeep.signatures import check_signature

# Unpacking an untrusted zip file, with limits that are checked before anything is written.
#
# | rejected | limit |
# |---|---|
# | more members | `MOST_MEMBERS` |
# | more unpacked bytes | `FREE` plus `RATIO` times the archive's size, and the free disk space |
# | a larger JSON, signature or source file | `LONGEST_RECORD` of the store |
# | a duplicate member, a link, a name outside the requested folders | |
# | an encrypted member, a compression other than deflate | |
#
# The declared size of a member is binding: no more of it is unpacked, and its checksum is verified.


MOST_MEMBERS = 200_000
"""Number of members at most. A bundle has the commits of a run up to one sample, ten an iteration, and a few tables."""
FREE = 2**30
RATIO = 20
"""Unpacked bytes for each packed byte at most. Tables and weights are compressed already, or random: real bundles need
less than 3."""
_TEXTS = (".json", ".sig", ".py")
_ENCRYPTED = 0x1


def unpack(file: Path, folder: Path, first: str, inside: Collection[str]) -> bytes:
    """Unpack all members below the folders `inside` into `folder`; return the bytes of the member `first`.

    Raises ValueError with the reason, and FileNotFoundError. Nothing is written outside `folder`.
    """
    packed = file.stat().st_size
    try:
        with ZipFile(file) as opened:
            members = opened.infolist()
            _check(members, packed, shutil.disk_usage(folder).free, first, inside)
            for member in members:
                if member.filename != first:
                    opened.extract(member, folder)
            return opened.read(first)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    except (BadZipFile, RuntimeError, OSError, EOFError, zlib.error) as error:  # such as a file with a folder's name
        raise ValueError(f"it cannot be unpacked: {error}") from None


def _check(members: list[ZipInfo], packed: int, free: int, first: str, inside: Collection[str]) -> None:
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"it has {len(members)} members, but at most {MOST_MEMBERS} are unpacked")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise ValueError("it has several members with the same name")
    for member in members:
        _check_member(member, first, inside)
    total, most = sum(member.file_size for member in members), FREE + RATIO * packed
    if total > most:
        raise ValueError(f"it would be {total} bytes unpacked, but at most {most} are unpacked from {packed}")
    if total > free:
        raise ValueError(
            f"it would be {total} bytes unpacked, but {free} are free: set TMPDIR to a folder with more space"
        )


def _check_member(member: ZipInfo, first: str, inside: Collection[str]) -> None:
    name = check_path(member.filename)
    if name != first and name.partition("/")[0] not in inside:
        raise ValueError(f"its member {name!r} is in none of its folders")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ValueError(f"its member {name!r} is a link or not a file")
    if member.flag_bits & _ENCRYPTED or member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"its member {name!r} is encrypted, or not compressed with deflate")
    if name.endswith(_TEXTS) and member.file_size > LONGEST_RECORD:
        raise ValueError(f"its member {name!r} has {member.file_size} bytes, but at most {LONGEST_RECORD} are read")


class BadBundle(Failure):
    """The file is no bundle. The message contains the reason."""


class Checked(Record):
    """Result of reading a bundle."""

    contents: Contents
    commits: int
    tables: int
    """Number of files of commits, including checkpoints, whose content matches the commit."""
    problems: tuple[str, ...]
    prompt: str | None
    response: str | None
    reward: float | None
    """Recorded reward."""
    graded_again: float | None
    """Reward that the grader computes now; None where it was not called."""
    not_graded: str | None
    """Why the grader was not called."""


def check(file: Path, *, signers: Mapping[str, str] | None = None, trust_code: bool = False) -> Checked:
    """Read and verify a bundle. Raises BadBundle, FileNotFoundError.

    `signers`: see `check_signature`. `trust_code`: run the source of a custom grader in the bundle; built-in graders
    always run.
    """
    with TemporaryDirectory(prefix="cairn-bundle-") as folder:
        contents = _unpacked(file, Path(folder))
        store = LocalStore(f"{folder}/{STORE}")
        try:
            ledger = Ledger.open(store, contents.run)
            commits, problems = _commits(ledger)
            read, more = _tables(ledger, commits, contents)
            problems += [*more, *_unnamed_tables(store, ledger, commits), *_misplaced(ledger, contents)]
            ledger.decisions.all()
            if signers:
                problems += _unsigned(store, signers)
            rollout = ledger.find(*parse_commit_name(contents.rollout))
            key = (contents.group_id, contents.sample_index)
            row = None if rollout is None else sample_row(ledger, rollout, key)
            graded = None if rollout is None else ledger.find(rollout.iteration, Step.REWARD, rollout.shard)
            recorded = None if graded is None else sample_row(ledger, graded, key)
            newest = ledger.find(*parse_commit_name(contents.newest))
        except (Damaged, FileNotFoundError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise BadBundle(f"{file} cannot be read: {error}") from None
        if row is None:
            raise BadBundle(f"{file} has no row of the sample that it names")
        if newest is None or newest.digest != contents.newest_digest:
            problems.append(f"{contents.newest} is not the commit that the bundle says is its newest")
        regraded, why = _graded(ledger, contents, row, recorded, Path(folder) / GRADER, problems, trust_code)
        reward = None if recorded is None else recorded["reward"]
        if why is None and (None if regraded is None else float(np.float32(regraded))) != reward:
            problems.append(f"the reward is recorded as {reward}, but its grader returns {regraded} now")
    return Checked(
        contents=contents,
        commits=len(commits),
        tables=read,
        problems=tuple(problems),
        prompt=row["prompt_text"],
        response=row["response_text"],
        reward=reward,
        graded_again=regraded,
        not_graded=why,
    )


def _unpacked(file: Path, folder: Path) -> Contents:
    try:
        fields = canonical.unseal(unpack(file, folder, CONTENTS, (STORE, GRADER)))
        if fields.get("format") != FORMAT:
            raise ValueError(f"it has format {fields.get('format')}, this Cairn reads format {FORMAT}")
        contents = Contents.model_validate(fields)
        if contents.grader is not None and not layout.is_name(contents.grader):
            raise ValueError(f"its grader's file has the invalid name {contents.grader!r}")
        return contents
    except ValueError as error:
        raise BadBundle(f"{file} is not a bundle of Cairn: {error}") from None


def _commits(ledger: Ledger) -> tuple[list[Commit], list[str]]:
    """Return all commits in the bundle, and problems with the chain between them."""
    commits = [commit for index in ledger.iterations() for commit in ledger.commits(index)]
    digests = {commit.name: commit.digest for commit in commits}
    problems = []
    for commit in commits:
        ledger.terms_of(commit)
        for name, digest in commit.inputs.items():
            if name.partition("/")[0].isdecimal() and digests.get(name) != digest:
                problem = "has another digest here" if name in digests else "is missing"
                problems.append(f"{commit.name} was made from {name}, which {problem}")
    return commits, problems


def _tables(ledger: Ledger, commits: list[Commit], contents: Contents) -> tuple[int, list[str]]:
    """Return the number of files of commits whose content matches, and problems with the others."""
    read, problems = 0, []
    for commit in commits:
        needed = _is_own(commit, contents)
        for output in commit.outputs:
            if not ledger.store.exists(layout.in_run(commit.run, output.path)):
                if needed:
                    problems.append(f"{output.path}, a file of {commit.name}, is missing")
                continue
            try:
                read_bytes(ledger.store, commit.run, output)
                read += 1
            except Damaged as error:
                problems.append(str(error))
    return read, problems


def _is_own(commit: Commit, contents: Contents) -> bool:
    """Whether `bundle` includes the files of a commit."""
    if commit.step in (Step.ROLLOUT, Step.REWARD):
        return (commit.iteration, commit.shard) == (contents.generated_in, parse_commit_name(contents.rollout)[2])
    if commit.step is Step.FILTER:
        return contents.generated_in <= commit.iteration <= contents.iteration
    if commit.step in (Step.SCORE, Step.ADVANTAGE):
        return commit.iteration == contents.iteration
    return commit.name == contents.checkpoint


def _misplaced(ledger: Ledger, contents: Contents) -> Iterator[str]:
    """Yield claims of the bundle on the sample's place that the commits do not confirm."""
    if parse_commit_name(contents.rollout)[:2] != (contents.generated_in, Step.ROLLOUT):
        claimed = f"says that iteration {contents.generated_in} generated the sample, but names {contents.rollout}"
        yield f"the bundle {claimed}"
    if contents.iteration != contents.generated_in and contents.group_id not in _groups(ledger, contents.iteration):
        yield f"iteration {contents.iteration} is not known to have taken group {contents.group_id}"
    if contents.checkpoint is not None and ledger.find(*parse_commit_name(contents.checkpoint)) is None:
        yield f"the bundle says that it contains the weights of {contents.checkpoint}, but they are missing"


def _groups(ledger: Ledger, iteration: int) -> list[int]:
    """Return the groups in the table of an iteration's selection; none where the bundle lacks that table."""
    selection = newest_selection(ledger.commits(iteration))
    if selection is None or not ledger.store.exists(layout.in_run(selection.run, selection.outputs[0].path)):
        return []
    return read_table(ledger.store, selection.run, selection.outputs[0], ["group_id"]).column("group_id").to_pylist()


def _unnamed_tables(store: LocalStore, ledger: Ledger, commits: list[Commit]) -> Iterator[str]:
    """Yield problems for tables that no commit names."""
    named = {layout.in_run(commit.run, output.path) for commit in commits for output in commit.outputs}
    for path in store.find(layout.RUNS):
        if not path.endswith((".json", ".sig")) and path not in named:
            yield f"no commit names {path}"


def _unsigned(store: LocalStore, signers: Mapping[str, str]) -> list[str]:
    paths = [path for path in store.find(layout.RUNS) if path.endswith(".json")]
    sealed = [path for path in paths if layout.parse_file(path.split("/")[1], path) is None]
    return [signed.problem for path in sealed if (signed := check_signature(store, path, signers)).problem]


def _graded(
    ledger: Ledger,
    contents: Contents,
    row: dict[str, Any],
    recorded: dict[str, Any] | None,
    sources: Path,
    problems: list[str],
    trust_code: bool,
) -> tuple[float | None, str | None]:
    """Return the reward that the grader computes now, or why it was not called."""
    from cairn.tasks.grading.graders import get_grader, grader_version, named_by_row
    from cairn.tasks.grading.opening import grader_args
    from cairn.tasks.grading.pool import GraderPool
    from cairn.tasks.grading.shaping import Overlong, sampled_tokens
    from cairn.tasks.rewards.grader import OUTSIDE
    from cairn.tasks.rewards.sample import Sample

    if recorded is None or recorded["reward"] is None:
        return None, "it has no recorded reward"
    if contents.given is None:
        return None, "the input of its grader is missing"
    try:
        sample = TypeAdapter(Sample).validate_python(contents.given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        problems.append(f"the grader's input in the bundle is not a sample: {where}: {first['msg']}")
        return None, "the input of its grader is not a sample"
    claimed = {"response": row["response_text"], "label": row["label"], "prompt": row["prompt_text"]}
    claimed |= {"metadata": from_json(row["metadata"] or "{}"), "finish_reason": row["finish_reason"]}
    lists = {"response_ids": row["response_ids"], "prompt_ids": row["prompt_ids"]}
    wrong = [name for name, value in claimed.items() if getattr(sample, name) != value]
    wrong += [name for name, value in lists.items() if list(getattr(sample, name)) != list(value)]
    if wrong:
        problems.append(f"the grader's input in the bundle differs from the sample's row: {', '.join(wrong)}")
        return None, "the input of its grader differs from its row"
    config = from_manifest(ledger.owner(contents.generated_in).manifest.config)
    reward = config.reward
    if reward.group_rm:
        return None, "its grader grades whole groups, and the other samples of its group are missing"
    if reward.custom_rm_path is not None:
        if contents.grader is None:
            return None, "the source of its grader is missing"
        if not trust_code:
            return None, "its grader is custom code: --trust-code runs it"
        function = reward.custom_rm_path.rpartition(":")[2]
        reward = reward.model_copy(update={"custom_rm_path": f"{sources / contents.grader}:{function}"})
    if reward.custom_rm_path is None and reward.rm_type in OUTSIDE:
        return None, "its grader calls an external service"
    args = grader_args(config.model_copy(update={"reward": reward}))
    grader = get_grader(reward.of(named_by_row(reward, sample.metadata)), args)
    if grader_version(grader) != recorded["grader_version"]:
        return None, f"its grader here has version {grader_version(grader)}, but it was {recorded['grader_version']}"
    with ExitStack() as stack:
        pool = stack.enter_context(GraderPool(reward, config.retry.grader, args))
        (answer,) = pool.grade([sample])
    overlong = Overlong.of(config)
    if overlong is not None:
        answer = overlong.shaped(answer, sampled_tokens(len(row["response_ids"]), row.get("segments")))
    return answer.reward, None
