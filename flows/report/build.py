"""Writing a report: from a ledger to the file."""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.loader import from_manifest
from cairn.flows.reading.episodes import EpisodeView, Texts, episodes, run_texts
from cairn.flows.reading.views import run_status
from cairn.flows.report.blocks import Block, shortened, text_blocks, token_blocks, turn_block
from cairn.flows.report.data import Choice, History, Progress, Samples, choose, read_history, read_samples, read_tokens
from cairn.flows.report.facts import (
    configuration_facts,
    cost_tables,
    evaluation_facts,
    fates_by_iteration,
    groups_of,
    lineage_facts,
    run_facts,
    selection_facts,
    tiles,
    time_facts,
    verification_facts,
)
from cairn.flows.report.page import chosen_panels, meaning, write_page
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record, code_version
from cairn.storage.upkeep.verification import Verified, verify
from cairn.tasks.batch.sequences import last_trajectory

WITH_TOKENS = 500
"""Number of samples that are shown with their tokens."""
_LARGEST = 50_000_000
"""Target size of the file in bytes."""
_TEXTS = 128 * 2**20
"""Number of bytes of all responses before compression at most: what a browser searches in a second."""
_TEXTS_OF_A_BLOCK = 4 * 2**20
_TRIED = 20
"""Number of responses by which a tokenizer is recognized as the run's."""
_ROOM = 0.72
"""Usable part of a block's share of the file, after base64 overhead and a reserve."""
_PARTS = (
    ("overview", "Overview"),
    ("curves", "Curves"),
    ("time", "Time and cost"),
    ("selection", "Selection"),
    ("evaluation", "Evaluation"),
    ("samples", "Samples"),
    ("lineage", "Lineage"),
    ("configuration", "Configuration"),
    ("verification", "Verification"),
)


_OF_RUNS_HERE = ("time", "evaluation", "configuration")
"""Parts that an imported run does not have."""


class Report(Record):
    """A written report."""

    run: str
    file: str
    bytes: int
    iterations: int
    samples: int
    with_tokens: int
    findings: int | None
    """Number of findings of the verification; None without one."""


def write_report(
    ledger: Ledger, file: Path, progress: Progress, *, verified: bool = True, price: float | None = None
) -> Report:
    """Write the report of a run into a file, atomically.

    Reads all commits and samples, and with `verified` every other file too. Raises Damaged if a commit is damaged, and
    OSError.

    Args:
        price: price of a device for an hour.
    """
    status, config = run_status(ledger.store, ledger.run), from_manifest(ledger.manifest.config)
    imported = status.imported is not None
    verification = verification_facts(list(_verified(ledger, progress))) if verified else None
    history = read_history(ledger, progress, price)
    samples = read_samples(ledger, progress)
    groups = groups_of(samples)
    why = choose(
        samples.rows.column("iteration").to_numpy(),
        samples.rows.column("reward").to_numpy(zero_copy_only=False),
        WITH_TOKENS,
        config.seed,
    )
    tokens = read_tokens(ledger, samples, np.flatnonzero(why != Choice.NONE).tolist(), progress)
    with_tokens = pc.count_distinct(tokens.column("row")).as_py()
    progress("packing", 0, 0)
    texts = _texts(ledger, samples, tokens)
    blocks, cut = _blocks(history, samples, groups, why, tokens, texts, config)
    if blocks.keys() != {"curves"}:
        blocks["turns"] = turn_block(_episodes(ledger, samples, why)).to_bytes()
    facts = {
        "imported": imported,
        "run": run_facts(status, config, history),
        "parts": [part for part in _PARTS if not (imported and part[0] in _OF_RUNS_HERE)],
        "tiles": tiles(status, history, samples, verification),
        "history": history,
        "time": time_facts(history),
        "costs": cost_tables(history.costs),
        "wasted": bool(history.costs.wasted),
        "selection": selection_facts(groups),
        "evaluation": evaluation_facts(history, config),
        "samples": _samples_facts(samples, with_tokens, cut),
        "lineage": lineage_facts(ledger, status, history),
        "configuration": configuration_facts(ledger),
        "verification": verification,
        "made": {"version": code_version().package, "at": time.time(), "store": ledger.store.url},
    }
    size = write_file(file, write_page(facts, blocks))
    return Report(
        run=ledger.run,
        file=str(file),
        bytes=size,
        iterations=len(history.iterations),
        samples=samples.rows.num_rows,
        with_tokens=with_tokens,
        findings=None if verification is None else len(verification["findings"]),
    )


def _verified(ledger: Ledger, progress: Progress) -> Iterator[Verified]:
    for done, check in enumerate(verify(ledger), 1):
        progress("verifying", done, 0)
        yield check


def _texts(ledger: Ledger, samples: Samples, tokens: pa.Table) -> Texts | None:
    """Return the texts of tokens; None if the model's tokenizer is missing, or does not decode the ids to the
    responses."""
    if not tokens.num_rows:
        return None
    rows, ids = tokens.column("row").to_numpy(), tokens.column("id").to_numpy()
    tried = np.unique(rows)[:_TRIED]
    responses = samples.rows.column("response").take(pa.array(tried)).to_pylist()
    lengths = samples.rows.column("trajectories").take(pa.array(tried)).to_pylist()
    last = [last_trajectory(ids[rows == row], own) for row, own in zip(tried, lengths, strict=True)]
    return run_texts(ledger, zip(map(np.asarray, last), responses, strict=True))


def _episodes(ledger: Ledger, samples: Samples, why: np.ndarray) -> dict[int, EpisodeView]:
    """Return the episodes of samples that have their tokens in the report, by row. Those whose tables are lost are left
    out: the samples' notes say so."""
    chosen = np.flatnonzero(why != Choice.NONE)
    names = ("group_id", "sample_index", "iteration", "shard")
    columns = [samples.rows.column(name).take(pa.array(chosen)).to_pylist() for name in names]
    keys = list(zip(*columns[:2], strict=True))
    rows = dict(zip(keys, chosen.tolist(), strict=True))
    views = episodes(ledger, dict(zip(keys, zip(*columns[2:], strict=True), strict=True)), skip_lost=True)
    return {rows[key]: view for key, view in sorted(views.items(), key=lambda item: rows[item[0]])}


def _blocks(
    history: History,
    samples: Samples,
    groups: pa.Table,
    why: np.ndarray,
    tokens: pa.Table,
    texts: Texts | None,
    config: Any,
) -> tuple[dict[str, bytes], int | None]:
    """Return the page's data by name, and the length to which responses were cut, in characters."""
    blocks = {"curves": _curves(history, groups, config).to_bytes()}
    if not samples.rows.num_rows:
        return blocks, None
    of_samples, of_tokens = token_blocks(tokens, texts)
    blocks |= {"token-samples": of_samples.to_bytes(), "token-values": of_tokens.to_bytes()}
    prompts = samples.rows.column("prompt").combine_chunks().dictionary_encode()
    packed = [block.to_bytes() for block in text_blocks("text", prompts.dictionary, _TEXTS_OF_A_BLOCK)]
    blocks |= {f"prompts-{number}": data for number, data in enumerate(packed)}
    room = int(_LARGEST * _ROOM) - sum(map(len, blocks.values()))
    most, whole = _TEXTS, samples.rows.column("response")
    while True:  # until they fit: how well texts pack is known when they are packed
        responses, cut = shortened(whole, most)
        answers = [block.to_bytes() for block in text_blocks("text", responses, _TEXTS_OF_A_BLOCK)]
        size = sum(map(len, answers))
        if size <= room or cut is None or most < 2**20:
            break
        most = min(most, _size(responses)) * room * 9 // size // 10
    counts = {"prompts": len(packed), "responses": len(answers)}
    rows = _rows(samples.rows, prompts, why, cut, counts)
    blocks |= {f"responses-{number}": data for number, data in enumerate(answers)}
    return {"samples": rows.to_bytes(), **blocks}, cut


def _size(texts: Any) -> int:
    return int(pc.sum(pc.binary_length(texts)).as_py() or 0)


def _rows(rows: pa.Table, prompts: Any, why: np.ndarray, cut: int | None, counts: Mapping[str, int]) -> Block:
    block = Block(rows.num_rows)
    for name in ("iteration", "sample_index", "prompt_tokens", "response_tokens", "masked_tokens", "age"):
        block.numbers(name, pc.fill_null(rows.column(name), -1).to_numpy().astype(np.int32))
    block.numbers("group_id", rows.column("group_id").to_numpy().astype(np.float64))
    for name in ("reward", "advantage", "log_prob", "seconds"):
        block.numbers(name, rows.column(name).to_numpy(zero_copy_only=False).astype(np.float32))
    for name in ("status", "finish_reason", "fate", "reason", "label", "error"):
        block.words(name, rows.column(name).combine_chunks())
    block.numbers("prompt", prompts.indices.to_numpy(zero_copy_only=False).astype(np.int32))
    block.numbers("why", why)
    lengths = pc.utf8_length(pc.fill_null(rows.column("response"), "")).to_numpy(zero_copy_only=False)
    block.numbers("response_cut", (lengths > (lengths.max() if cut is None else cut)).astype(np.uint8))
    block.value("prompts", len(prompts.dictionary))
    block.value("blocks", dict(counts))
    block.value("cut", cut)
    return block


def _curves(history: History, groups: pa.Table, config: Any) -> Block:
    """Return a block with all curves over the iterations."""
    block = Block(len(history.iterations))
    numbers = np.array([one.number for one in history.iterations], np.int32)
    block.numbers("iteration", numbers)
    names = sorted({name for one in history.iterations for name in one.metrics})
    metrics = {name: np.array([one.metrics.get(name, np.nan) for one in history.iterations]) for name in names}
    steps = [step for step in Step if any(step in one.seconds for one in history.iterations)]
    times = {f"time:{step}": np.array([one.seconds.get(step, 0.0) for one in history.iterations]) for step in steps}
    fates = {f"fate:{name}": counts for name, counts in fates_by_iteration(groups, numbers).items()}
    for name, values in {**metrics, **times, **fates}.items():
        block.numbers(name, values.astype(np.float64))
    idle = {"metric": "perf/other_time", "label": "none at work", "meaning": meaning("perf/other_time"), "colour": 8}
    stacks = [
        {
            "title": "Seconds of each iteration",
            "unit": "s",
            "home": "#time-panels",
            "curves": [*_parts(times), idle] if steps else [],
        },
        {"title": "Groups of each iteration", "unit": "groups", "home": "#selection-panels", "curves": _parts(fates)},
    ]
    block.value("panels", chosen_panels({name: values.tolist() for name, values in metrics.items()}))
    block.value("stacks", [stack for stack in stacks if stack["curves"]])
    trained = list(history.evaluations)
    benchmarks = [
        {"name": one.name, "values": [history.evaluations[at].get(f"eval/{one.name}") for at in trained]}
        for one in config.eval.benchmarks
    ]
    block.value("scores", {"trained": trained, "benchmarks": benchmarks})
    block.value("meanings", {name: meaning(name) for name in names})
    return block


def _parts(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [{"metric": name, "label": name.partition(":")[2], "meaning": ""} for name in columns]


def _samples_facts(samples: Samples, with_tokens: int, cut: int | None) -> dict[str, Any]:
    rows = samples.rows
    count = rows.num_rows
    first, last = (pc.min_max(rows.column("iteration")).as_py()[end] for end in ("min", "max"))
    all_shown = with_tokens == count
    note = f"All {count:,} samples" if count > 1 else "The one sample"
    if not with_tokens:
        note += ", none of them with tokens"
    elif not all_shown:
        note += (
            f", {with_tokens:,} of them with their tokens: the best, the worst and the median ones by reward, and "
            "others drawn at random from all iterations"
        )
    note += ". Keys: / searches, j and k (or the arrows in the table) move between samples."
    if cut is not None:
        note += f" Responses without tokens are cut at {cut:,} characters; `cairn show` shows them in full."
    facts = {"count": count, "note": note, "first": first, "last": last, "all_shown": all_shown}
    return {**facts, "notes": samples.notes}


def write_file(file: Path, pieces: Iterable[bytes]) -> int:
    """Write a temporary file next to the target and rename it. Return its size in bytes."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for piece in pieces:
                out.write(piece)
            size = out.tell()
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
    return size
