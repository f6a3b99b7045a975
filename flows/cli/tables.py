"""Texts and tables for people."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from cairn.flows.text import number, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from cairn.flows.reading.pieces import Piece
    from cairn.flows.reading.samples import SampleView, Scores
    from cairn.flows.reading.views import Groups, Retries, RunStatus
    from cairn.storage.ledger.decisions import GateStatus
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


def grid(*names: str, right: Collection[str] = (), fold: bool = False) -> "Table":
    """Return a table without lines and rows. `right`: names of columns of numbers; `fold`: fold long cells."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=bool(names))
    for name in names:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(Text(printable(name)), justify=justify, overflow="fold" if fold else "ellipsis")
    return table


def numbers(header: Collection[str], lines: Iterable[tuple[str, ...]]) -> "Table":
    """Return a table of numbers, each under its name."""
    from rich.text import Text

    table = grid(*header, right=header)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def lines_of(facts: "Iterable[tuple[str, str | Text]]", style: str = "") -> "Iterator[Text]":
    """Yield a line for each fact, after its name. `style`: of the names."""
    from rich.text import Text

    facts = list(facts)
    width = max(len(name) for name, _ in facts) + 3
    for name, fact in facts:
        yield Text.assemble((name.ljust(width), style), printable(fact) if isinstance(fact, str) else fact)


def runs_table(found: Sequence["RunStatus"], store: str) -> "Iterator[RenderableType]":
    """Yield a table, one run a line."""
    from rich.text import Text

    if not found:
        yield f"no such runs in {store}; `cairn train RECIPE` starts one"
        return
    why = any(status.failure is not None for status in found)
    names = ("run", "state", "iterations", "reward", "eval", "last commit", *(("why",) if why else ()))
    table = grid(*names, right=("iterations", "reward"))
    for status in found:
        table.add_row(
            status.run,
            Text(status.state, STATE_STYLES[status.state]),
            f"{status.iterations}/{status.num_rollout}",
            number(status.reward, ".3f"),
            ", ".join(f"{name} {_last(scores)}" for name, scores in status.eval.items()),
            age(status.last_commit_at),
            *((Text(printable(status.failure.sentence) if status.failure else ""),) if why else ()),
        )
    yield table


def status_lines(status: "RunStatus", balance: str | None = None) -> "Iterator[Text]":
    """Return everything known about one run, a fact a line.

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
    if status.imported is not None:
        del facts["weight version"], facts["state digest"]
        facts["imported from"] = f"{status.imported.source} ({status.imported.described})"
    if status.parent is not None:
        why = f": {status.parent.reason}" if status.parent.reason else ""
        facts["forked from"] = f"{status.parent.run}@{status.parent.iteration}{why}"
    if status.same_bits is not None:
        facts["self-test"] = "the same bits twice" if status.same_bits else "other bits the second time"
    if status.groups.recovered or status.groups.waiting:
        facts["groups"] = _interrupted(status.groups)
    if status.retries.by_error or status.retries.samples:
        facts["tried again"] = _retries(status.retries)
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
    if status.failed_samples is not None and (status.failure is None or status.failure.commonest is None):
        facts["failed samples"] = str(status.failed_samples)
    if status.failure is not None:
        facts |= {name: text.replace("\n", " ") for name, text in (*status.failure.facts(), *status.failure.commands())}
    if len(status.written_by) > 1:
        facts["written by"] = " → ".join(
            f"{version.package} ({(version.commit or 'no git')[:7]}, {age(version.since)})"
            for version in status.written_by
        )
    if status.layouts:
        facts["layout"] = "; ".join(f"{one} ({age(one.since)})" for one in status.layouts)
    return lines_of(facts.items())


def stale_lines(stale: Sequence["StaleStep"]) -> list[str]:
    """Return a line for each step and reason of stale steps; an empty list if none are stale."""
    if not stale:
        return []
    direct = [one for one in stale if "/" not in one[3]]
    indirect = [one for one in stale if "/" in one[3]]
    lines = ["Committed steps that would no longer match:"]
    for (step, why), group in _grouped(direct, lambda one: (one[1], one[3])).items():
        lines.append(f"  {step} of {_iterations(group)}, which read {why}")
    for (step,), group in _grouped(indirect, lambda one: (one[1],)).items():
        lines.append(f"  {step} of {_iterations(group)}, made from those")
    return lines


def summary_lines(status: "RunStatus", line: Callable[..., str]) -> Iterator[str]:
    """Yield the results of a run, and commands for a closer look. `line` returns a command with the options that it
    needs here."""
    for name, scores in status.eval.items():
        yield f"{name}: {_change(scores)}"
    show, verify = line("cairn", "show", status.run), line("cairn", "verify", status.run)
    yield f"look at samples: {show}; check every byte: {verify}"


def sample_lines(views: Sequence["SampleView"], total: int, *, alone: bool = False) -> "Iterator[RenderableType]":
    """Yield each sample with its texts. `alone`: the user requested only one sample."""
    from rich.console import Group
    from rich.text import Text

    from cairn.flows.reading.pieces import pieces

    for view in views:
        yield Text(f"sample {view.number} of {total} ".ljust(80, "─"), "dim")
        fate = str(view.disposition or "not filtered yet") + (f" ({view.reason})" if view.reason else "")
        facts = {
            "reward": number(view.reward, ".3f"),
            "advantage": number(view.advantage, ".3f"),
            "label": view.label if view.label is not None else "–",
            "finish": view.finish_reason or "–",
            "fate": fate,
            "tokens": "–" if view.response_tokens is None else f"{view.prompt_tokens} + {view.response_tokens}",
            "group": f"{view.group_id}, sample {view.sample_index}",
        }
        if view.images:
            images = (f"{image.sha256[:12]} ({image.width} × {image.height} pixels)" for image in view.images)
            facts["images"] = ", ".join(images)
        if view.error:
            facts["error"] = view.error
        named = (Text.assemble((f"{name} ", "dim"), printable(fact)) for name, fact in facts.items())
        yield Group(Text("   ").join(named))  # folded between words
        texts = {"prompt": view.prompt} | ({} if view.episode is not None else {"response": view.response})
        for name, text in texts.items():
            yield Text(name, "bold dim")
            yield Text(printable(text))
        if view.episode is not None:
            for piece in pieces(view.episode):
                yield from piece_lines(piece)
            if view.episode.seconds is not None:
                yield Text(f"{view.episode.seconds:.2f} s from the first call to the end of the last", "dim")
    if len(views) < total and not alone:
        yield Text(f"{len(views)} of {total} samples; --limit shows more", "dim")


def piece_lines(piece: "Piece") -> "Iterator[Text]":
    """Yield a heading and texts for a piece of an episode."""
    from rich.text import Text

    name = (printable(piece.name), "bold dim" if piece.facts else "bold")
    yield Text.assemble(name, (f" {'   '.join(piece.facts)}" if piece.facts else "", "dim"))
    if piece.arguments:
        yield Text(printable(piece.arguments))
    if piece.text is not None:
        yield Text(printable(piece.text), "red" if piece.failed else "")


@contextmanager
def reporting(hidden: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the current activity in a line on a terminal's stderr. Yields the function that sets the line's text."""
    from rich.console import Console

    with Console(stderr=True, quiet=hidden).status("reading") as line:
        yield line.update


def _grouped(
    stale: Sequence["StaleStep"], key: Callable[["StaleStep"], tuple[str, ...]]
) -> dict[tuple[str, ...], list["StaleStep"]]:
    groups: dict[tuple[str, ...], list[StaleStep]] = {}
    for one in stale:
        groups.setdefault(key(one), []).append(one)
    return groups


def _iterations(stale: Sequence["StaleStep"]) -> str:
    numbers = sorted({iteration for iteration, *_ in stale})
    ranges = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"iteration{'s' * (len(numbers) > 1)} {ranges} ({len(stale)} commit{'s' * (len(stale) > 1)})"


def _interrupted(groups: "Groups") -> str:
    """Return how many groups of an interrupted rollout were reused, and how many were generated."""
    parts = []
    if groups.recovered:
        parts.append(f"{groups.recovered} reused from an interrupted rollout, {groups.generated} generated")
    if groups.waiting:
        parts.append(f"{groups.waiting} finished and stored for the next driver")
    return "; ".join(parts)


def _retries(retries: "Retries") -> str:
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


def _gate(run: str, gate: "GateStatus") -> str:
    from cairn.flows.reading.gates import approval_request

    if gate.state == "open" or gate.verdict is None:
        since = f", since {age(gate.gate.at)}" if gate.gate else ""
        return approval_request(gate, run) + since
    why = f": {gate.verdict.why}" if gate.verdict.why else ""
    return f"rejected before iteration {gate.iteration} by {gate.verdict.by} {age(gate.verdict.at)}{why}"


def _change(scores: "Scores") -> str:
    from cairn.flows.reading.metrics import spell_score

    return f"{spell_score(scores.first, scores.first_failed, scores.first_graded)} → {_last(scores)}"


def _last(scores: "Scores") -> str:
    from cairn.flows.reading.metrics import spell_score

    return spell_score(scores.last, scores.last_failed, scores.last_graded)
