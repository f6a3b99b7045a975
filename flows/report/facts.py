"""The report's tables: its text content, for screen and print."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from cairn.configs.schema.run import RunConfig
from cairn.flows.history.diff import differing_options
from cairn.flows.reading.balance import Balance
from cairn.flows.reading.costs import Costs
from cairn.flows.reading.views import RunState, RunStatus
from cairn.flows.report.data import History
from cairn.flows.text import number, percent
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Imported
from cairn.storage.ledger.schemas import Disposition
from cairn.storage.upkeep.verification import Verified, counts

# Cost tables: devices, tokens and money by step, and waste.


_PARTS = {
    "starting": "starting: drivers, engines, weights",
    "idle": "idle: devices without work",
    "uncommitted": "uncommitted: after a driver's last commit",
}


def cost_tables(costs: Costs) -> list[dict[str, Any]]:
    """Return tables in the form of the page's template: caption, headers, rows of texts."""
    unit = f"{costs.devices.kind}-seconds"
    rate, reserved = costs.price_per_device_hour, costs.reserved_device_seconds
    priced = ["Price"] if rate is not None else []

    def row(name: str, seconds: float | None, tokens: int | None) -> list[str]:
        price = [] if rate is None else ["–" if seconds is None else f"{seconds / 3600 * rate:,.2f}"]
        return [
            name,
            number(seconds, ",.1f"),
            percent(None if seconds is None or not reserved else seconds / reserved),
            number(tokens, ","),
            *price,
        ]

    heads = [unit, "Share", "Tokens", *priced]
    parts = [row(str(step.step), step.device_seconds, step.tokens) for step in costs.steps if step.device_seconds]
    parts += [row(text, getattr(costs, f"{name}_device_seconds"), None) for name, text in _PARTS.items()]
    parts.append(row("all reserved", reserved, None))
    tables = [{"caption": _caption(costs, unit), "heads": ["Spent on", *heads], "rows": parts, "sum": True}]
    wasted = [
        [
            *row(
                f"{waste.cause} ({waste.count:,} {waste.unit if waste.count != 1 else waste.unit.removesuffix('s')})",
                waste.device_seconds,
                waste.tokens,
            ),
            "a fault" if waste.after_fault else "the algorithm",
        ]
        for waste in costs.wasted
    ]
    if wasted:
        tables.append({"caption": "Wasted work", "heads": ["Cause", *heads, "Due to"], "rows": wasted, "sum": False})
    return tables


def _caption(costs: Costs, unit: str) -> str:
    devices = costs.devices
    kinds = f"{devices.kind}{'s' if devices.reserved != 1 else ''}"
    text = f"{devices.reserved:g} {kinds} reserved by {costs.drivers} driver{'s' if costs.drivers != 1 else ''}"
    if costs.device_seconds_per_accepted_sample is not None:
        text += f"; {costs.device_seconds_per_accepted_sample:,.3f} {unit} for each sample trained on"
    return text


Facts = dict[str, Any]
UNDECIDED = "not decided"
_FATES = {
    Disposition.TRAIN: "trained on",
    Disposition.BUFFER: "stored for later",
    Disposition.CONTINUE: "to be continued",
    Disposition.DROP: "dropped",
}
_TROUBLE = {
    RunState.PREEMPTED: "The run's driver was asked to end. `cairn resume` continues from the last commit.",
    RunState.RUNNING: "The run is at work: this is what it had committed when the report was made.",
    RunState.NEW: "No driver has owned this run yet. This report shows what it shares with its parent.",
}
_IMPORTING = {
    RunState.RUNNING: "The import follows the trainer: this is what it had read when the report was made.",
}


def run_facts(status: RunStatus, config: RunConfig, history: History) -> Facts:
    """Return the head of the page."""
    place = "" if status.iteration is None else f", in iteration {status.iteration} before {status.step}"
    ends, failure = history.iterations, status.failure
    return {
        "name": status.run,
        "state": str(status.state),
        "place": f"{status.iterations} of {status.num_rollout} iterations{place}",
        "began": ends[0].began_at if ends and not status.imported else None,
        "ended": max(one.ended_at for one in ends) if ends else None,
        "recipe": _recipe(config) if status.imported is None else _origin(status.imported),
        "trouble": None if failure else (_TROUBLE if status.imported is None else _IMPORTING).get(status.state),
        "failure": failure and {"facts": failure.facts(), "commands": failure.commands(elsewhere=True)},
    }


def _origin(imported: Imported) -> str:
    return f"Imported from {imported.source} ({imported.described}): what another trainer recorded."


def _recipe(config: RunConfig) -> str:
    rollout, algorithm = config.rollout, config.algorithm
    side = f", {rollout.pipeline}" if rollout.pipeline != "sync" else ""
    if not config.samples_responses:
        name, rows = ("SFT", "demonstrations") if algorithm.learns_from == "demonstrations" else ("DPO", "pairs")
        return (
            f"{name} of {config.model.path}: {rollout.rollout_batch_size} {rows} of {config.data.path} an iteration, "
            f"trained by {config.training.engine}."
        )
    return (
        f"{algorithm.advantage_estimator.upper()} of {config.model.path}: {rollout.rollout_batch_size} prompts × "
        f"{rollout.n_samples_per_prompt} samples an iteration{side}, generated by {rollout.engine}, trained by "
        f"{config.training.engine}."
    )


def tiles(status: RunStatus, history: History, samples: int, verification: Facts | None) -> list[Facts]:
    """Return the key figures of a run with so many samples. `verification`: see `verification_facts`."""
    tiles: list[Facts] = []
    rewards = [one.metrics["rollout/raw_reward"] for one in history.iterations if "rollout/raw_reward" in one.metrics]
    if rewards:
        tiles.append({"name": "Reward", "value": f"{rewards[-1]:.3f}", "note": _since(rewards)})
    for name, scores in list(status.eval.items())[:3]:
        if scores.last is not None and scores.first is not None:
            failed = f"; {scores.last_failed:,} failed" if scores.last_failed else ""
            tiles.append(
                {"name": name, "value": f"{scores.last:.3f}", "note": f"from {scores.first:.3f} at first{failed}"}
            )
    tokens = sum(one.metrics.get("rollout/response_tokens", 0) for one in history.iterations)
    if samples:
        note = "" if status.imported else f"{round(tokens):,} tokens"
        tiles.append({"name": "Samples", "value": f"{samples:,}", "note": note})
    if history.iterations and not status.imported:
        whole = sum(one.metrics["perf/step_time"] for one in history.iterations)
        tiles.append(
            {
                "name": "Time in iterations",
                "value": duration(whole),
                "note": f"{duration(whole / len(history.iterations))} each",
            }
        )
    if verification is not None:
        findings = len(verification["findings"])
        verdict = "intact" if not findings else f"{findings:,} finding{'s' if findings > 1 else ''}"
        tiles.append({"name": "Ledger", "value": verdict, "note": f"{verification['commits']:,} commits read again"})
    return tiles


def _since(values: Sequence[float]) -> str:
    return f"from {values[0]:.3f} in the first iteration" if len(values) > 1 else "in the one iteration"


def time_facts(history: History) -> Facts:
    """Return how the time of the iterations was spent. Steps that ran concurrently each count."""
    whole = [one.metrics["perf/step_time"] for one in history.iterations if "perf/step_time" in one.metrics]
    rows = []
    for step in Step:
        spent = [one.seconds[step] for one in history.iterations if step in one.seconds]
        if spent:
            rows.append(_time_row(str(step), spent, sum(whole)))
    others = [one.metrics["perf/other_time"] for one in history.iterations if "perf/other_time" in one.metrics]
    if rows:
        rows.append(_time_row("none at work", others, sum(whole)))
    together = sum(row["total"] for row in rows)
    note = "Steps ran side by side, so their shares add up to more than the whole." if together > sum(whole) else ""
    last = {"median": median(whole), "longest": max(whole)} if whole else {}
    return {"rows": rows, "total": sum(whole), "note": note, **last}


def _time_row(name: str, spent: Sequence[float], whole: float) -> Facts:
    return {
        "name": name,
        "total": sum(spent),
        "share": sum(spent) / whole if whole else 0.0,
        "median": median(spent),
        "longest": max(spent),
    }


def balance_facts(balance: Balance | None, config: RunConfig) -> Facts | None:
    """Return the shares of time in which each side works, and what limits the run."""
    if balance is None:
        return None
    sentence = balance.sentence(config)
    return {
        "sides": [("Rollout engines", 1 - balance.rollout_wait), ("Trainer", 1 - balance.trainer_wait)],
        "sentence": f"{sentence[0].upper()}{sentence[1:]}.",
        "window": f"iterations {balance.first} to {balance.last}",
    }


def selection_facts(groups: pa.Table) -> Facts:
    """Return the filter's decisions about the groups, with reasons."""
    decisions = groups.group_by(["fate", "reason"]).aggregate([("group_id", "count"), ("reward", "mean")]).to_pylist()
    order = list(map(str, _FATES))
    decisions.sort(key=lambda row: (order.index(row["fate"]) if row["fate"] in order else 9, -row["group_id_count"]))
    rows = [
        {
            "fate": fate_name(row["fate"]),
            "reason": row["reason"] or "",
            "groups": row["group_id_count"],
            "share": row["group_id_count"] / groups.num_rows,
            "reward": row["reward_mean"],
        }
        for row in decisions
    ]
    return {"groups": groups.num_rows, "rows": rows}


def fate_name(fate: str | None) -> str:
    """Return the filter's decision in words."""
    return UNDECIDED if fate is None else _FATES[Disposition(fate)]


def fates_by_iteration(groups: pa.Table, iterations: np.ndarray) -> dict[str, np.ndarray]:
    """Return the number of groups of each iteration, by decision and reason."""
    counted: dict[str, np.ndarray] = {}
    names = [
        f"{fate_name(fate)}: {reason}" if reason else fate_name(fate)
        for fate, reason in zip(groups.column("fate").to_pylist(), groups.column("reason").to_pylist(), strict=True)
    ]
    place_of = {iteration: place for place, iteration in enumerate(iterations.tolist())}
    for name, iteration in zip(names, groups.column("iteration").to_pylist(), strict=True):
        if iteration in place_of:  # else it was committed after the iterations were read
            counted.setdefault(name, np.zeros(len(iterations)))[place_of[iteration]] += 1
    return dict(sorted(counted.items(), key=lambda item: (not item[0].startswith("trained"), -item[1].sum())))


def evaluation_facts(history: History, config: RunConfig) -> Facts:
    """Return every score of every benchmark, newest first."""
    names = [benchmark.name for benchmark in config.eval.benchmarks]
    rows = [
        {
            "trained": trained,
            "benchmark": name,
            "score": metrics[f"eval/{name}"],
            "length": metrics.get(f"eval/{name}/response_len/mean"),
            "truncated": metrics.get(f"eval/{name}-truncated_ratio"),
            "failed": metrics.get(f"eval/{name}-failed_samples"),
        }
        for trained, metrics in reversed(history.evaluations.items())
        for name in names
        if f"eval/{name}" in metrics
    ]
    return {"rows": rows}


def lineage_facts(ledger: Ledger, status: RunStatus, history: History) -> Facts:
    """Return the runs, code versions and machines behind a run."""
    chain, last = ledger, "and later"
    runs: list[Facts] = []
    while True:
        parent = chain.manifest.parent
        runs.append(
            {
                "run": chain.run,
                "iterations": f"{chain.first_iteration} {last}",
                "created": chain.manifest.created_at,
                "why": "" if parent is None else f"forked from {parent.run}@{parent.iteration}"
                + (f": {parent.reason}" if parent.reason else ""),
            }
        )  # fmt: skip
        if chain.parent is None:
            break
        last, chain = f"to {chain.first_iteration - 1}", chain.parent
    order = list(Step)
    return {
        "runs": runs,
        "versions": [
            {"package": one.package, "commit": (one.commit or "no git")[:12], "since": one.since}
            for one in status.written_by
        ],
        "layouts": [{"change": str(one), "since": one.since} for one in status.layouts],
        "machines": [
            {
                "steps": ", ".join(sorted(steps, key=lambda step: order.index(Step(step)))),
                "device": device,
                "host": host,
                "threads": threads,
            }
            for (device, host, threads), steps in history.machines.items()
        ],
        "digests": [
            *(
                ()
                if status.imported
                else (("Weight version", str(status.weight_version)), ("State digest", status.state_digest or "–"))
            ),
            *((f"Digest of {name}", digest) for name, digest in sorted(ledger.terms.inputs.items())),
        ],
    }


def configuration_facts(ledger: Ledger) -> Facts:
    """Return every option of a run by section, with differences from its default and from its parent."""
    changed = {name: before for name, before, _ in differing_options(ledger.parent, ledger)} if ledger.parent else {}
    sections: dict[str, list[Facts]] = {}
    for path, value, is_set in _options(ledger.config, ()):
        section = path[0] if len(path) > 1 else "run"
        name = ".".join(path)
        before = next((before for option, before in changed.items() if _is_within(name, option)), None)
        differs = any(_is_within(name, option) for option in changed)
        sections.setdefault(section, []).append(
            {
                "name": name,
                "value": _spelled(value),
                "given": is_set,
                "differs": differs,
                "before": _spelled(before),
            }
        )
    parent = ledger.parent.run if ledger.parent else None
    return {"sections": list(sections.items()), "parent": parent, "changed": bool(changed)}


def _is_within(name: str, option: str) -> bool:
    longer, shorter = (name, option) if len(name) > len(option) else (option, name)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def _options(section: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """Yield (path, value, whether it differs from its default) for the options below a section."""
    for name, described in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _options(value, (*path, name))
        else:
            plain = section.model_dump(mode="json", include={name})[name]
            default = None if described.is_required() else described.get_default(call_default_factory=True)
            yield (*path, name), plain, described.is_required() or value != default


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def verification_facts(checks: Sequence[Verified]) -> Facts:
    """Return counts of the checks and findings of `cairn verify`."""
    findings = [finding for check in checks for finding in check.findings]
    faults = Counter(str(finding.fault) for finding in findings)
    dumped = [finding.model_dump(mode="json") for finding in findings]
    return {**counts(checks), "findings": dumped, "faults": list(faults.items())}


def duration(seconds: float | None) -> str:
    """Return a duration in suitable units: `3 h 12 min`, `4 min 05 s`, `1.42 s`, `38 ms`."""
    if seconds is None:
        return "–"
    if seconds >= 3600:
        return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms"
