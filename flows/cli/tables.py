"""Print tables and lines for people."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cairn.flows.cli.printing import say
from cairn.flows.text import number, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from cairn.flows.reading.samples import SampleView, Scores
    from cairn.flows.reading.views import Groups, Retries, RunStatus
    from cairn.storage.ledger.decisions import GateStanding
    from cairn.storage.upkeep.accounting import GroupCounts
    from cairn.storage.upkeep.collector import Garbage
    from cairn.storage.upkeep.retention import Retirement
    from cairn.storage.upkeep.signatures import Signed
    from cairn.storage.upkeep.verification import Verified
    from cairn.tasks.steps import StaleStep

STATE_STYLES = {
    "new": "cyan",
    "running": "green",
    "completed": "blue",
    "failed": "red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "waiting": "magenta",
    "rejected": "red",
    "damaged": "red",
    "deleted": "red",
}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def print_runs(found: Sequence["RunStatus"], store: str) -> None:
    """Print a table, one run a line."""
    from rich.table import Table
    from rich.text import Text

    if not found:
        say(f"no runs in {store}; `cairn train RECIPE` starts one")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("run", "state", "iterations", "reward", "eval", "last commit"):
        table.add_column(name, justify="right" if name in ("iterations", "reward") else "left")
    for status in found:
        table.add_row(
            status.run,
            Text(status.state, STATE_STYLES[status.state]),
            f"{status.iterations}/{status.num_rollout}",
            number(status.reward, ".3f"),
            ", ".join(f"{name} {_last(scores)}" for name, scores in status.eval.items()),
            age(status.last_commit_at),
        )
    console().print(table)


def print_status(status: "RunStatus", balance: str | None = None) -> None:
    """Print everything known about one run, a fact a line.

    `balance` says whether engines or trainer wait, if there is enough data.
    """
    from rich.text import Text

    place = "" if status.iteration is None else f", in iteration {status.iteration} before {status.step}"
    facts: dict[str, str | Text] = {
        "run": status.run,
        "state": Text(status.state, STATE_STYLES[status.state]),
        "iterations": f"{status.iterations} of {status.num_rollout}{place}",
        "weight version": str(status.weight_version),
        "state digest": status.state_digest or "–",
        "reward": number(status.reward, ".3f") + _chosen(status),
    }
    if status.reward is None and status.loss is not None:
        del facts["reward"]
        facts["loss"] = number(status.loss, ".3f")
    if status.parent is not None:
        why = f": {status.parent.reason}" if status.parent.reason else ""
        facts["forked from"] = f"{status.parent.run}@{status.parent.iteration}{why}"
    if status.same_bits is not None:
        facts["self-test"] = "the same bits twice" if status.same_bits else "other bits the second time"
    if status.groups.recovered or status.groups.waiting:
        facts["groups"] = _interrupted(status.groups)
    if status.retries.by_error or status.retries.samples:
        facts["tried again"] = _tried_again(status.retries)
    if status.rollout_engines is not None:
        facts["rollout engines"] = f"{status.rollout_engines} at the newest batch"
    for name, scores in status.eval.items():
        facts[f"eval {name}"] = _change(scores)
    if balance is not None:
        facts["balance"] = balance
    facts["last commit"] = f"{status.last_commit or '–'}, {age(status.last_commit_at)}"
    if status.gate is not None:
        facts["gate"] = _gate(status.run, status.gate)
    if status.driver is not None:
        driver, ended = status.driver, f", {status.driver.outcome}" if status.driver.outcome else ""
        facts["driver"] = f"pid {driver.pid} on {driver.host}, epoch {driver.epoch}, began {age(driver.since)}{ended}"
    if len(status.written_by) > 1:
        facts["written by"] = " → ".join(
            f"{version.package} ({(version.commit or 'no git')[:7]}, {age(version.since)})"
            for version in status.written_by
        )
    print_facts(list(facts.items()))


def print_facts(facts: Sequence[tuple[str, "str | Text"]], style: str = "") -> None:
    """Print a fact a line, after its name. `style`: of the names."""
    from rich.text import Text

    out, width = console(), max(len(name) for name, _ in facts)
    for name, fact in facts:
        shown = printable(fact) if isinstance(fact, str) else fact
        out.print(Text.assemble((name.ljust(width + 3), style), shown), soft_wrap=True)


def stale_lines(stale: Sequence["StaleStep"]) -> list[str]:
    """Return a line for each step and reason of stale steps; an empty list if none are stale."""
    if not stale:
        return []
    itself = [found for found in stale if "/" not in found[3]]
    made_from = [found for found in stale if "/" in found[3]]
    lines = ["Committed steps that would no longer match:"]
    for (step, why), found in _grouped(itself, lambda found: (found[1], found[3])).items():
        lines.append(f"  {step} of {_iterations(found)}, which read {why}")
    for (step,), found in _grouped(made_from, lambda found: (found[1],)).items():
        lines.append(f"  {step} of {_iterations(found)}, made from those")
    return lines


def print_summary(status: "RunStatus") -> None:
    """Print the results of a run, and commands for a closer look."""
    for name, scores in status.eval.items():
        say(f"{name}: {_change(scores)}")
    last = status.num_rollout - 1
    say(f"look at samples: cairn show {status.run} {last}; check every byte: cairn verify {status.run}")


def print_samples(views: Sequence["SampleView"], total: int, *, alone: bool = False) -> None:
    """Print each sample with its texts. `alone`: the user asked for one sample only."""
    from rich.text import Text

    from cairn.flows.cli.episode_lines import episode_lines

    out = console()
    for view in views:
        out.print(Text(f"sample {view.number} of {total} ".ljust(80, "─"), "dim"))
        fate = str(view.disposition or "not filtered yet") + (f" ({view.reason})" if view.reason else "")
        facts = {
            "reward": number(view.reward, ".3f"),
            "advantage": number(view.advantage, ".3f"),
            "label": view.label if view.label is not None else "–",
            "finish": view.finish_reason,
            "fate": fate,
            "tokens": f"{view.prompt_tokens} + {view.response_tokens}",
            "group": f"{view.group_id}, sample {view.sample_index}",
        }
        if view.images:
            images = (f"{image.sha256[:12]} ({image.width} × {image.height} pixels)" for image in view.images)
            facts["images"] = ", ".join(images)
        if view.error:
            facts["error"] = view.error
        out.print(Text("   ").join(Text.assemble((f"{name} ", "dim"), printable(fact)) for name, fact in facts.items()))
        texts = {"prompt": view.prompt} | ({} if view.episode is not None else {"response": view.response})
        for name, text in texts.items():
            out.print(Text(name, "bold dim"))
            out.print(Text(printable(text)), soft_wrap=True)
        if view.episode is not None:
            for line in episode_lines(view.episode):
                out.print(line, soft_wrap=True)
    if len(views) < total and not alone:
        out.print(Text(f"{len(views)} of {total} samples; --limit or --sample for others", "dim"))


def print_verified(run: str, checks: Sequence["Verified"]) -> None:
    """Print the findings, and the amount of data that was read."""
    from cairn.storage.upkeep.verification import counts

    findings = [finding for check in checks for finding in check.findings]
    for finding in findings:
        say(f"{finding.fault}: {finding.message}")
    of = counts(checks)
    read = f"{of['commits']} commits, {of['files']} files, {of['bytes'] / 1e6:.1f} MB"
    if of["retired"]:
        read += f" ({of['retired']} older files are retired)"
    if of["redacted"]:
        read += f" ({of['redacted']} of them redacted)"
    if of["decisions"]:
        read += f", {of['decisions']} decision{'s' if of['decisions'] > 1 else ''} of people"
    if of["upgrades"]:
        read += f", {of['upgrades']} upgrade{'s' if of['upgrades'] > 1 else ''} to another version of the code"
    verdict = f"{len(findings)} findings" if findings else "every byte is what was committed"
    for groups in (check.groups for check in checks if check.groups is not None):
        _print_groups(groups)
    say(f"run {run}: {read} read; {verdict}")


def _print_groups(groups: "GroupCounts") -> None:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in groups.dropped.items())
    dropped = f"{sum(groups.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    said = f"groups: {groups.trained} trained on, {dropped}, {groups.open} open"
    for iterations, why in ((groups.retired, "are retired"), (groups.unreadable, "cannot be read")):
        if iterations:
            several = f"{len(iterations)} iterations from {iterations[0]} to {iterations[-1]}"
            which = several if len(iterations) > 1 else f"iteration {iterations[0]}"
            said += f"; groups of {which} could not be checked: their tables {why}"
    say(said)


def print_signed(signed: Sequence["Signed"]) -> None:
    """Print the problems of unsigned files, then a line for each author of the ledger's files."""
    from collections import Counter

    for one in signed:
        if one.problem:
            say(f"unsigned: {one.problem}")
    for name, count in sorted(Counter(one.signer for one in signed if one.signer).items()):
        say(f"{name} wrote {count} of {len(signed)} files of the ledger")


def print_garbage(run: str, old: Sequence["Retirement"], found: Sequence["Garbage"], removed: bool) -> None:
    """Print the files of a run that can be removed, or were removed: one a line, but one line an iteration for those
    that retention does not keep."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("path", "bytes", "why"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for one in old:
        table.add_row(f"iteration {one.iteration}: {len(one.files)} files", str(one.bytes), f"old {one.kind}")
    for garbage in found:
        table.add_row(
            Text(printable(garbage.path)), "–" if garbage.bytes is None else str(garbage.bytes), garbage.reason
        )
    files = sum(len(one.files) for one in old) + len(found)
    size = sum(one.bytes for one in old) + sum(garbage.bytes or 0 for garbage in found)
    if files:
        console().print(table)
    end = "removed" if removed else f"can be removed: run `cairn gc {run} --apply`" if files else "can be removed"
    say(f"run {run}: {files} files, {size / 1e6:.1f} MB, {end}")


def with_progress(checks: Iterable["Verified"], hidden: bool) -> Iterator["Verified"]:
    """Yield the checks unchanged, and show the last one in a line on a terminal's stderr."""
    from rich.console import Console

    console = Console(stderr=True, quiet=hidden)
    with console.status("reading") as line:
        for number, check in enumerate(checks):
            line.update(f"{number} commits read, last {check.name}")
            yield check


@contextmanager
def reporting() -> Iterator[Callable[[str], None]]:
    """Show the current activity in a line on a terminal's stderr. Yields the function that sets the line's text."""
    from rich.console import Console

    with Console(stderr=True).status("reading") as line:
        yield line.update


def _grouped(
    stale: Sequence["StaleStep"], key: Callable[["StaleStep"], tuple[str, ...]]
) -> dict[tuple[str, ...], list["StaleStep"]]:
    groups: dict[tuple[str, ...], list[StaleStep]] = {}
    for found in stale:
        groups.setdefault(key(found), []).append(found)
    return groups


def _iterations(stale: Sequence["StaleStep"]) -> str:
    numbers = sorted({iteration for iteration, *_ in stale})
    ranges = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"iteration{'s' * (len(numbers) > 1)} {ranges} ({len(stale)} commit{'s' * (len(stale) > 1)})"


def _interrupted(groups: "Groups") -> str:
    """Return how many groups of an interrupted rollout were kept, and how many had to be generated."""
    parts = []
    if groups.recovered:
        parts.append(f"{groups.recovered} reused from an interrupted rollout, {groups.generated} generated")
    if groups.waiting:
        parts.append(f"{groups.waiting} finished and stored for the next driver")
    return "; ".join(parts)


def _tried_again(retries: "Retries") -> str:
    """Return a text such as `steps 3 times (engine_died 2, store 1), 4 samples; 7.0 s waited`."""
    parts = []
    if retries.by_error:
        kinds = ", ".join(f"{kind} {count}" for kind, count in retries.by_error.items())
        parts.append(f"steps {sum(retries.by_error.values())} times ({kinds})")
    if retries.samples:
        parts.append(f"{retries.samples} samples graded again")
    return f"{', '.join(parts)}; {retries.waited:.1f} s waited, in the newest iteration"


def age(moment: float | None) -> str:
    """Return a text such as `3 min ago`."""
    if moment is None:
        return "–"
    seconds = max(0.0, time.time() - moment)
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), (1, "s"))
    return f"{seconds / size:.0f} {unit} ago"


def _chosen(status: "RunStatus") -> str:
    """Return the reward of the trained samples as text, where it differs from that of all samples."""
    return "" if status.trained_reward == status.reward else f" ({number(status.trained_reward, '.3f')} of its batch)"


def _gate(run: str, gate: "GateStanding") -> str:
    from cairn.flows.reading.gates import asking

    if gate.state == "open" or gate.verdict is None:
        since = f", since {age(gate.gate.at)}" if gate.gate else ""
        return asking(gate, run) + since
    why = f": {gate.verdict.why}" if gate.verdict.why else ""
    return f"rejected before iteration {gate.iteration} by {gate.verdict.by} {age(gate.verdict.at)}{why}"


def _change(scores: "Scores") -> str:
    from cairn.flows.reading.metrics import spell_score

    return f"{spell_score(scores.first, scores.first_failed, scores.first_graded)} → {_last(scores)}"


def _last(scores: "Scores") -> str:
    from cairn.flows.reading.metrics import spell_score

    return spell_score(scores.last, scores.last_failed, scores.last_graded)


def print_table(header: Iterable[str], lines: Iterable[tuple[str, ...]]) -> None:
    """Print columns of numbers, each under its name."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in header:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*map(Text, line))
    console().print(table)


def console() -> "Console":
    """Return a console for the terminal, or for the file or pipe in its place."""
    from rich.console import Console

    terminal = Console(highlight=False)
    # A file or a pipe has no width at which lines should be folded.
    return terminal if terminal.is_terminal else Console(highlight=False, width=200)
