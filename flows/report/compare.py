"""Two runs side by side, or one at two iterations: what differs, how it went, and the first sample that differs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from cairn.flows.history.diff import Parting, diff
from cairn.flows.reading.samples import SampleView, iteration_samples
from cairn.flows.report.blocks import Block
from cairn.flows.report.build import write_file
from cairn.flows.report.content import made
from cairn.flows.report.data import History, Progress, read_history
from cairn.flows.report.facts import duration
from cairn.flows.report.page import PANELS, chosen_panels, meaning, write_page
from cairn.flows.text import number, shortened
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store.errors import Retired
from cairn.storage.store.store import Store

_PARTS = (("overview", "Overview"), ("curves", "Curves"), ("evaluation", "Evaluation"), ("sample", "Sample"))
_FURTHEST = 3
"""Number of iterations from the first difference on in which a differing sample is looked for."""
_SHOWN = 400
"""Number of characters of a text in the paragraph at most."""


class Place(Record):
    """A run, up to one of its iterations."""

    run: str
    until: int
    """Last iteration that counts; -1 where there is none."""

    def __str__(self) -> str:
        return f"{self.run}@{self.until}"


class Pair(Record):
    """A value of both."""

    name: str
    first: float | None
    second: float | None
    unit: str = ""

    @property
    def change(self) -> float | None:
        """The second value minus the first."""
        return None if self.first is None or self.second is None else self.second - self.first

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        change = "" if not self.change else f" ({self.change:+.3g})"
        return f"{self.name} {shown(self.first)} and {shown(self.second)}{unit}{change}"


class OtherSample(Record):
    """The first sample that came out differently: the same prompt's, in both."""

    iteration: int
    group_id: int
    sample_index: int
    prompt: str
    responses: tuple[str, str]
    rewards: tuple[float | None, float | None]
    shared: int
    """Number of characters that both responses begin with."""


class Cost(Record):
    """What the iterations took; None for what the trainer of an imported run did not record."""

    seconds: Pair
    device_seconds: Pair
    tokens: Pair


class Compared(Record):
    """Two runs side by side."""

    first: Place
    second: Place
    shared: int | None
    """Last iteration that both share, because one is a fork of the other or both of a third."""
    parting: Parting
    """Options, code and data that differ, and the first step with another result."""
    iteration: int | None
    """Iteration whose metrics are compared: the last of which both have some, or that was asked for; None for two."""
    metrics: tuple[Pair, ...]
    evaluations: tuple[Pair, ...]
    """The newest score of each benchmark, up to those iterations."""
    sample: OtherSample | None
    cost: Cost

    def sentences(self) -> Iterator[str]:
        """Yield what differs and how it went, in a sentence each."""
        first, second, parting = self.first, self.second, self.parting
        if self.shared is not None:
            yield f"{first.run} and {second.run} share iterations 0 to {self.shared}"
        options = [f"{name} {one} → {other}" for name, one, other in parting.options]
        yield f"Other options: {'; '.join(options)}" if options else "All options are the same"
        if parting.inputs:
            yield f"Other code or data: {'; '.join(map(str, parting.inputs))}"
        else:
            yield "Code, data and models are the same"
        if parting.parts_at is not None:
            how = "; ".join(shortened(sentence, _SHOWN) for sentence in parting.how)
            yield f"They first differ at {parting.parts_at}: {how}"
        elif parting.compared:
            end = "" if parting.ended is None else f" up to the end of {parting.ended}"
            yield f"Their {parting.compared} commits are equal{end}"
        if (one := self.sample) is not None:
            texts = [repr(shortened(text, _SHOWN)) for text in dict.fromkeys(one.responses)]
            answers = " and ".join(texts) if len(texts) > 1 else f"{texts[0]} in both"
            yield (
                f"The first sample that differs is {one.sample_index} of group {one.group_id} in iteration "
                f"{one.iteration}: {answers}, rewards {' and '.join(map(shown, one.rewards))}"
            )
        at = f"iteration {self.iteration}" if self.iteration is not None else f"{first} and {second}"
        if outcome := [*self.metrics[:1], *self.evaluations]:
            yield f"In {at}: {', '.join(map(str, outcome))}"
        cost = self.cost
        took = "; ".join(
            f"{run} took {duration(seconds)} and {number(tokens, ',.0f')} generated tokens"
            for run, seconds, tokens in (
                (str(first), cost.seconds.first, cost.tokens.first),
                (str(second), cost.seconds.second, cost.tokens.second),
            )
            if seconds is not None
        )
        if took:
            yield took

    @property
    def paragraph(self) -> str:
        """The sentences, one after the other."""
        return " ".join(sentence if sentence.endswith("…") else f"{sentence}." for sentence in self.sentences())

    @property
    def names(self) -> tuple[str, str]:
        """Names of both, with their iterations where they are one run."""
        if self.first.run != self.second.run:
            return self.first.run, self.second.run
        return str(self.first), str(self.second)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All values of both."""
        return (*self.metrics, *self.evaluations, self.cost.seconds, self.cost.device_seconds, self.cost.tokens)


def compare(
    first: Ledger,
    second: Ledger,
    first_until: int | None = None,
    second_until: int | None = None,
    progress: Progress = lambda what, done, of: None,
) -> tuple[Compared, tuple[History, History]]:
    """Compare two runs, or one with itself, up to an iteration of each. Reads all commits, and tables of samples where
    the runs part. Raises Damaged."""
    histories = read_history(first, progress), read_history(second, progress)
    untils = _until(histories[0], first_until), _until(histories[1], second_until)
    asked = first_until is not None or second_until is not None
    common = min(untils)
    places = untils if asked else (_last_of_both(histories, common),) * 2
    parting = diff(first, second, common)
    found = Compared(
        first=Place(run=first.run, until=untils[0]),
        second=Place(run=second.run, until=untils[1]),
        shared=_shared(first, second, common),
        parting=parting,
        iteration=places[0] if places[0] == places[1] and common >= 0 else None,
        metrics=tuple(_metrics(histories, places)),
        evaluations=tuple(_evaluations(first, second, histories, places)),
        sample=_first_sample(first, second, parting, common),
        cost=_cost(histories, untils),
    )
    return found, histories


def _last_of_both(histories: tuple[History, History], common: int) -> int:
    """Return the last iteration, up to `common`, of which both have the reward, or the loss; else `common`."""
    for name in ("rollout/raw_reward", "train/loss"):
        own = [{one.number for one in history.iterations if name in one.metrics} for history in histories]
        if both := {at for at in own[0] & own[1] if at <= common}:
            return max(both)
    return common


def _until(history: History, until: int | None) -> int:
    numbers = [one.number for one in history.iterations if until is None or one.number <= until]
    return max(numbers, default=-1)


def _shared(first: Ledger, second: Ledger, common: int) -> int | None:
    if first.run == second.run:
        return None
    shared = [i for i in range(common + 1) if first.owner(i).run == second.owner(i).run]
    return max(shared, default=None)


def _metrics(histories: tuple[History, History], places: tuple[int, int]) -> Iterator[Pair]:
    """Yield the first metric of every panel that one of the iterations has."""
    values = [
        next((one.metrics for one in history.iterations if one.number == place), {})
        for history, place in zip(histories, places, strict=True)
    ]
    for panel in PANELS:
        name = next((name for name, _ in panel.curves if any(name in own for own in values)), None)
        if name is not None and (not panel.needs or any(panel.needs in own for own in values)):
            first, second = (own.get(name) for own in values)
            yield Pair(name=_lower(panel.title), first=first, second=second, unit=panel.unit)


def _lower(title: str) -> str:
    return title if title.startswith("KL") else title[0].lower() + title[1:]


def _evaluations(
    first: Ledger, second: Ledger, histories: tuple[History, History], untils: tuple[int, int]
) -> Iterator[Pair]:
    names = dict.fromkeys(one.name for ledger in (first, second) for one in ledger.config.eval.benchmarks)
    for name in names:
        first_score, second_score = (
            next((scores[0] for scores in reversed(_scores(history, f"eval/{name}", until))), None)
            for history, until in zip(histories, untils, strict=True)
        )
        yield Pair(name=name, first=first_score, second=second_score)


def _scores(history: History, name: str, until: int) -> list[tuple[float, int]]:
    """Return (score, number of iterations trained) of a benchmark's evaluations, up to an iteration."""
    return [(metrics[name], at) for at, metrics in history.evaluations.items() if at <= until + 1 and name in metrics]


def _first_sample(first: Ledger, second: Ledger, parting: Parting, common: int) -> OtherSample | None:
    if parting.parts_at is None:
        return None
    begins = int(parting.parts_at.partition("/")[0])
    for iteration in range(begins, min(common, begins + _FURTHEST) + 1):
        try:
            one, other = (
                {(view.group_id, view.sample_index): view for view in iteration_samples(ledger, iteration)}
                for ledger in (first, second)
            )
        except (LookupError, Retired):
            continue
        for key in sorted(one.keys() & other.keys()):
            if _outcome(one[key]) != _outcome(other[key]):
                responses = one[key].response, other[key].response
                return OtherSample(
                    iteration=iteration,
                    group_id=key[0],
                    sample_index=key[1],
                    prompt=one[key].prompt,
                    responses=responses,
                    rewards=(one[key].reward, other[key].reward),
                    shared=sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*responses, strict=False))),
                )
    return None


def _outcome(view: SampleView) -> tuple[str, str, float | None]:
    return view.prompt, view.response, view.reward


def _cost(histories: tuple[History, History], untils: tuple[int, int]) -> Cost:
    own = [
        [one.metrics for one in history.iterations if one.number <= until]
        for history, until in zip(histories, untils, strict=True)
    ]
    seconds, tokens = ([_sum(each, name) for each in own] for name in ("perf/step_time", "rollout/response_tokens"))
    devices = [
        None if time is None else history.costs.reserved_device_seconds
        for history, time in zip(histories, seconds, strict=True)
    ]
    return Cost(
        seconds=Pair(name="time in iterations", first=seconds[0], second=seconds[1], unit="s"),
        device_seconds=Pair(name="reserved", first=devices[0], second=devices[1], unit="device-seconds"),
        tokens=Pair(name="generated", first=tokens[0], second=tokens[1], unit="tokens"),
    )


def _sum(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [each[name] for each in metrics if name in each]
    return sum(values) if values else None


def shown(value: float | None) -> str:
    """Return a value as text; a dash for None."""
    return "–" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def write_comparison(found: Compared, histories: tuple[History, History], store: Store, file: Path) -> int:
    """Write the page of two runs into a file, atomically. Return its size in bytes. Raises OSError."""
    names = found.names
    facts = {
        "name": " and ".join(names),
        "content": "compare.html",
        "live": None,
        "parts": _PARTS,
        "names": names,
        "paragraph": found.paragraph,
        "options": found.parting.options,
        "inputs": found.parting.inputs,
        "pairs": found.pairs,
        "evaluations": found.evaluations,
        "shown": shown,
        "sample": found.sample,
        "made": made(store),
    }
    scored = [pair.name for pair in found.evaluations]
    blocks = {"curves": _curves(histories, (found.first.until, found.second.until), names, scored).to_bytes()}
    return write_file(file, write_page(facts, blocks))


def _curves(
    histories: tuple[History, History], untils: tuple[int, int], names: tuple[str, str], benchmarks: Sequence[str]
) -> Block:
    """Return a block with the curves of both over the iterations of either, two in each panel."""
    own = [
        {one.number: one.metrics for one in history.iterations if one.number <= until}
        for history, until in zip(histories, untils, strict=True)
    ]
    numbers = sorted({*own[0], *own[1]})
    block = Block(len(numbers))
    block.numbers("iteration", np.array(numbers, np.int32))
    panels: list[dict[str, Any]] = []
    drawn = {curve for each in own for curve in _worth_drawing(list(each.values()))}
    for panel in PANELS:
        for metric, label in panel.curves:
            if metric not in drawn:
                continue
            values = [np.array([each.get(at, {}).get(metric, np.nan) for at in numbers]) for each in own]
            curves = []
            for side, name in enumerate(names):
                block.numbers(f"{side}:{metric}", values[side].astype(np.float64))
                curves.append({"metric": f"{side}:{metric}", "label": name, "meaning": meaning(metric)})
            title = panel.title if metric == panel.curves[0][0] else f"{panel.title}: {label}"
            panels.append({"title": title, "unit": panel.unit, "curves": curves, "log": panel.log})
    trained = sorted({*histories[0].evaluations, *histories[1].evaluations})
    scores = []
    for benchmark in benchmarks:
        for name, history, until in zip(names, histories, untils, strict=True):
            known = {at: score for score, at in _scores(history, f"eval/{benchmark}", until)}
            scores.append({"name": f"{benchmark}, {name}", "values": [known.get(at) for at in trained]})
    for name, value in {"panels": panels, "stacks": [], "scores": {"trained": trained, "benchmarks": scores}}.items():
        block.value(name, value)
    block.value("meanings", {})
    return block


def _worth_drawing(iterations: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the metrics that the report of a run draws."""
    names = {name for metrics in iterations for name in metrics}
    curves = {name: [metrics.get(name, np.nan) for metrics in iterations] for name in names}
    return {curve["metric"] for panel in chosen_panels(curves) for curve in panel["curves"]}
