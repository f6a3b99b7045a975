"""Commands that maintain a store: verify, gc, delete, probe."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import JsonOption, Root, RunArgument, Shown, SignersOption, bad_input, read_signers_of
from cairn.flows.cli.decisions import AsOption, WhyOption
from cairn.flows.cli.printing import print_stderr
from cairn.flows.cli.tables import grid, reporting
from cairn.flows.text import printable, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.storage.ledger.ledger import Ledger
    from cairn.storage.ledger.redacted import Finding
    from cairn.storage.upkeep.accounting import GroupCounts
    from cairn.storage.upkeep.collector import Garbage
    from cairn.storage.upkeep.retention import Retirement
    from cairn.storage.upkeep.signatures import Signed
    from cairn.storage.upkeep.verification import Verified

OptionalRunArgument = Annotated[str | None, Argument(metavar="RUN", help="Name of the run.")]
EvalsOption = Annotated[bool, Option("--evals", help="The results of evaluations, instead of a run.")]


def _require_one(run: str | None, evals: bool) -> None:
    """Raise BadInput unless the user named either a run or the evaluations."""
    if (run is None) != evals:
        raise BadInput("name a run, or use --evals for the results of evaluations")


def verify(
    root: Root,
    run: OptionalRunArgument = None,
    evals: EvalsOption = False,
    signers: SignersOption = None,
    json: JsonOption = False,
) -> Shown:
    """Check every byte and every commit of a run.

    The command compares every byte with its digest and every commit with its inputs. It also accounts for every
    generated group. Exits with 1 if anything is missing, altered or made from something else than the ledger says, or
    if a group is trained on twice or lost. With --evals it checks all evaluation results instead, which belong to the
    store and not to a run.

    With `--signers` it shows the authors of all files; a file that no signer has signed is a finding. `cairn keygen`
    creates keys.

    Examples:

    - `cairn verify quickstart`
    - `cairn verify quickstart --json | jq '.findings, .groups'`
    - `cairn verify --evals`
    - `cairn verify quickstart --signers team.txt`
    - `cairn verify --evals --signers team.txt`
    """
    from cairn.storage.upkeep import evals as results
    from cairn.storage.upkeep import signatures, verification

    _require_one(run, evals)
    names = read_signers_of(signers)
    signed: list[Signed] = []
    counts: dict[str, Any]
    if run is None:
        checks = _with_progress(results.verify(root.store), hidden=json)
        counts = {
            "results": len(checks),
            **{name: sum(getattr(check, name) for check in checks) for name in ("files", "bytes")},
        }
        if names:
            signed = list(signatures.check_result_signatures(root.store, names))
    else:
        ledger = root.ledger(run)
        checks = _with_progress(verification.verify(ledger), hidden=json)
        counts = {
            "run": run,
            **verification.counts(checks),
            "layout_changes": {check.name: check.layout for check in checks if check.layout},
            "groups": next(check.groups for check in checks if check.groups is not None),
        }
        if names:
            signed = list(signatures.check_signatures(ledger, names))
    findings = [finding for check in checks for finding in check.findings]
    unsigned = [{"fault": "unsigned", "path": one.path, "message": one.problem} for one in signed if one.problem]
    value = dict(counts)
    if names:
        value["signers"] = {one.path: one.signer for one in signed if one.signer}
    value["findings"] = [*findings, *unsigned]
    return Shown(value, _verified(counts, findings, signed), failed=bool(value["findings"]))


def _with_progress(checks: Iterable["Verified"], hidden: bool) -> list["Verified"]:
    """Return the checks, and meanwhile show the last one in a line on a terminal's stderr."""
    done = []
    with reporting(hidden) as progress:
        for number, check in enumerate(checks):
            progress(f"{number} commits read, last {check.name}")
            done.append(check)
    return done


def _verified(counts: Mapping[str, Any], findings: Sequence["Finding"], signed: Sequence["Signed"]) -> Iterator[str]:
    """Yield the findings, the amount of data that was read, and a line for each author of signed files."""
    for finding in findings:
        yield f"{finding.fault}: {finding.message}"
    verdict = f"{len(findings)} finding{'s' * (len(findings) > 1)}" if findings else "every byte is what was committed"
    read = f"{counts['files']} files, {size(counts['bytes'])}"
    if "results" in counts:
        yield f"evaluations: {counts['results']} results, {read} read; {verdict}"
    else:
        yield _accounted(counts["groups"])
        for name, what in (("retired", "older files are retired"), ("redacted", "of them redacted")):
            read += f" ({counts[name]} {what})" if counts[name] else ""
        for name, what in (
            ("decisions", "of people"),
            ("upgrades", "to another version of the code"),
            ("changes", "of the layout of ranks and engines"),
        ):
            if count := counts["layouts" if name == "changes" else name]:
                read += f", {count} {name if count > 1 else name[:-1]} {what}"
        for name, options in counts["layout_changes"].items():
            changed = ", ".join(f"{option} {before} → {after}" for option, (before, after) in options.items())
            yield f"layout: {changed} ({name})"
        yield f"run {counts['run']}: {counts['commits']} commits, {read} read; {verdict}"
    for one in signed:
        if one.problem:
            yield f"unsigned: {one.problem}"
    for name, count in sorted(Counter(one.signer for one in signed if one.signer).items()):
        yield f"{name} wrote {count} of {len(signed)} files of the ledger"


def _accounted(groups: "GroupCounts") -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in groups.dropped.items())
    dropped = f"{sum(groups.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    text = f"groups: {groups.trained} trained on, {dropped}, {groups.open} open"
    for iterations, why in ((groups.retired, "are retired"), (groups.unreadable, "cannot be read")):
        if iterations:
            several = f"{len(iterations)} iterations from {iterations[0]} to {iterations[-1]}"
            which = several if len(iterations) > 1 else f"iteration {iterations[0]}"
            text += f"; groups of {which} could not be checked: their tables {why}"
    return text


def gc(
    root: Root,
    run: OptionalRunArgument = None,
    evals: EvalsOption = False,
    apply: Annotated[bool, Option("--apply", help="Remove the listed files.")] = False,
) -> Shown:
    """List files of a run that nothing needs, or remove them.

    Interrupted drivers leave such files: attempts that lost, groups that are now in a committed shard, incomplete
    writes. The run's retention frees others: `checkpoint.save_retain_interval`, `retain_snapshots` and
    `retain_weights`. The command is safe next to a live driver. It skips what that driver writes, and finished groups
    that the next driver will use. With --evals it finds what interrupted evaluations left, of all users.

    Examples:

    - `cairn gc quickstart` shows what would go
    - `cairn gc quickstart --apply`
    - `cairn gc --evals --apply`
    """
    from cairn.configs.loader import from_manifest
    from cairn.storage.upkeep import collector
    from cairn.storage.upkeep import evals as results
    from cairn.storage.upkeep.retention import due, retire

    _require_one(run, evals)
    if run is None:
        found = list(results.garbage(root.store))
        if apply:
            results.collect(root.store, found)
        return Shown({"removed": apply, "garbage": found}, _evaluation_garbage(found, removed=apply))
    ledger = root.ledger(run)
    keep = from_manifest(ledger.manifest.config).checkpoint
    old = retire(ledger, keep, everything=True) if apply else list(due(ledger, keep, everything=True))
    found = list(collector.garbage(ledger))
    if apply:
        collector.collect(ledger, found)
    value = {"run": run, "removed": apply, "retention": old, "garbage": found}
    return Shown(value, _run_garbage(run, old, found, removed=apply))


def _evaluation_garbage(found: Sequence["Garbage"], removed: bool) -> Iterator[str]:
    for one in found:
        yield f"{one.reason}: {one.path}"
    total = sum(one.bytes or 0 for one in found)
    yield f"evaluations: {len(found)} files, {size(total)}, {_fate('--evals', len(found), removed)}"


def _run_garbage(
    run: str, old: Sequence["Retirement"], found: Sequence["Garbage"], removed: bool
) -> "Iterator[RenderableType]":
    """Yield the files of a run that can be removed, or were removed: one a line, but one line an iteration for those
    that retention does not keep."""
    from rich.text import Text

    table = grid("path", "size", "why", right=("size",), fold=True)
    for one in old:
        table.add_row(f"iteration {one.iteration}: {len(one.files)} files", size(one.bytes), f"old {one.kind}")
    for garbage in found:
        known = "–" if garbage.bytes is None else size(garbage.bytes)
        table.add_row(Text(printable(garbage.path)), known, garbage.reason)
    files = sum(len(one.files) for one in old) + len(found)
    total = sum(one.bytes for one in old) + sum(garbage.bytes or 0 for garbage in found)
    if files:
        yield table
    yield f"run {run}: {files} files, {size(total)}, {_fate(run, files, removed)}"


def _fate(which: str, files: int, removed: bool) -> str:
    return "removed" if removed else "can be removed" + (f": run `cairn gc {which} --apply`" if files else "")


def delete(
    root: Root,
    run: RunArgument,
    prompt: Annotated[
        int | None, Option("--prompt", metavar="N", min=0, help="Only the samples of row N of the data set, from 0.")
    ] = None,
    why: WhyOption = None,
    by: AsOption = None,
    yes_delete: Annotated[
        str | None, Option("--yes-delete", metavar="RUN", help="Confirm with the run's name, instead of typing it.")
    ] = None,
) -> Shown:
    """Delete a run, or the samples of one prompt.

    Samples, checkpoints and metrics are gone for good. You have to type the name again. The command refuses while a
    driver lives, and while forks of the run need it. Repeat the command to finish an interrupted deletion; the run
    cannot be used in between.

    With `--prompt` the text and the tokens of the prompt's samples are removed from every table of the run. The run
    stays usable, and a driver may be running. Rows, rewards and digests stay. A commit records what was redacted, by
    whom, why, and which weights were trained on it. The command refuses while the samples are needed to restore
    weights, until a later checkpoint exists.

    Examples:

    - `cairn delete quickstart`
    - `cairn delete quickstart --yes-delete quickstart` in scripts
    - `cairn delete quickstart --prompt 17 --why "its author asked for it"`
    """
    from cairn.storage.upkeep.collector import delete_run

    store = root.store
    if prompt is not None:
        return _delete_prompt(root.ledger(run), prompt, by=by, why=why, yes_delete=yes_delete)
    if why is not None or by is not None:
        raise BadInput("--why and --as need --prompt: a deleted run has no ledger to record them")
    warning = f"This permanently deletes run {run!r} in {store.url}."
    _require_confirmed(run, yes_delete, warning, "Type the run's name to delete it")
    with bad_input(FileNotFoundError, ValueError):
        delete_run(store, run)
    return Shown({"run": run, "deleted": True}, f"run {run} is deleted")


def _require_confirmed(run: str, typed: str | None, warning: str, request: str) -> None:
    """Raise BadInput unless the user has typed the run's name, in an option or now. Without a terminal it is
    empty."""
    if typed is None:
        print_stderr(warning)
        typed = typer.prompt(request, err=True, default="", show_default=False)
    if typed != run:
        raise BadInput(f"the confirmed name is {typed!r}, not {run!r}; nothing was deleted")


def _delete_prompt(ledger: "Ledger", prompt: int, *, by: str | None, why: str | None, yes_delete: str | None) -> Shown:
    from cairn.storage.ledger.decisions import Redaction
    from cairn.storage.upkeep.redaction import redact
    from cairn.tasks.durable.quarantine import wanted

    run, what = ledger.run, f"the text and the tokens of prompt {prompt}"
    warning = f"This permanently removes {what} from run {run!r} in {ledger.store.url}."
    _require_confirmed(run, yes_delete, warning, "Type the run's name to do so")
    unreached: list[str] = []
    with reporting() as progress, bad_input(ValueError):
        decision = redact(ledger, prompt, by=by, why=why, progress=progress, on_remaining=unreached.append)
    done = decision.what
    assert isinstance(done, Redaction)
    text = [
        f"prompt {prompt} is redacted in run {run}: {done.samples} samples, {len(done.files)} tables (decision "
        f"{decision.number})"
    ]
    if done.trained_in:
        iterations = ", ".join(map(str, done.trained_in))
        text.append(
            f"updates of iteration {iterations} trained on them: weights from version {min(done.weight_versions)} on "
            "contain their effect"
        )
    text += [f"not reached: {sentence}" for sentence in unreached]
    if prompt not in wanted(ledger, ledger.decisions.all()):
        text.append(f"it may be drawn again; cairn quarantine {run} --prompt {prompt} excludes it")
    value = decision.model_dump(mode="json") | {"digest": decision.digest, "not_reached": unreached}
    return Shown(value, text)


def probe(root: Root) -> Shown:
    """Check whether a store can hold runs.

    Every run does this before it starts. The store must respond, return what was written, and refuse to create an
    existing file a second time. Nothing is left behind.

    Examples:

    - `cairn probe --store s3://bucket/experiments`
    """
    from cairn.storage.opening import open_for_runs

    url = open_for_runs(root.url).url
    return Shown({"store": url, "fit": True}, f"{url} can store runs")
