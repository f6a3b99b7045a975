"""Contents of a run's page, for a report and for the board: values of the template, and blocks of data by name."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.balance import Balance
from cairn.flows.reading.episodes import EpisodeView, Texts, episodes, run_texts
from cairn.flows.reading.views import RunStatus
from cairn.flows.report.blocks import Block, shortened, text_blocks, token_blocks, turn_block
from cairn.flows.report.data import History, Samples
from cairn.flows.report.facts import (
    balance_facts,
    cost_tables,
    evaluation_facts,
    fates_by_iteration,
    lineage_facts,
    run_facts,
    selection_facts,
    tiles,
    time_facts,
)
from cairn.flows.report.page import chosen_panels, meaning
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import code_version
from cairn.storage.store.store import Store
from cairn.tasks.batch.sequences import last_trajectory

_TEXTS = 128 * 2**20
"""Number of bytes of all responses before compression at most: what a browser searches in a second."""
_TEXTS_OF_A_BLOCK = 4 * 2**20
_TRIED = 20
"""Number of responses by which a tokenizer is recognized as the run's."""
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


def run_values(
    ledger: Ledger,
    status: RunStatus,
    history: History,
    groups: pa.Table,
    samples: int,
    balance: Balance | None,
    verification: dict[str, Any] | None,
    configuration: dict[str, Any],
) -> dict[str, Any]:
    """Return the values of the template of a run's page, except those of its samples.

    Args:
        groups: as `read_groups` returns them.
        samples: number of samples.
        balance: as `cairn.flows.reading.balance.measured` returns it.
        verification: see `verification_facts`.
        configuration: see `configuration_facts`.
    """
    config, imported = ledger.config, status.imported is not None
    return {
        "name": ledger.run,
        "content": "run.html",
        "live": None,
        "run": run_facts(status, config, history),
        "imported": imported,
        "parts": [part for part in _PARTS if not (imported and part[0] in _OF_RUNS_HERE)],
        "tiles": tiles(status, history, samples, verification),
        "history": history,
        "time": time_facts(history),
        "balance": balance_facts(balance, config),
        "costs": cost_tables(history.costs),
        "wasted": bool(history.costs.wasted),
        "selection": selection_facts(groups),
        "evaluation": evaluation_facts(history, config),
        "lineage": lineage_facts(ledger, status, history),
        "configuration": configuration,
        "verification": verification,
        "made": made(ledger.store),
    }


def made(store: Store) -> dict[str, Any]:
    """Return what the foot of a page says: who made it, when and from what."""
    return {"version": code_version().package, "at": time.time(), "store": store.url}


def curves_block(history: History, groups: pa.Table, config: RunConfig) -> Block:
    """Return a block with all curves over the iterations. `groups`: as `read_groups` returns them."""
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
    known = {name: [one.metrics.get(name) for one in history.iterations] for name in names}
    block.value("panels", chosen_panels(known))
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


def sample_blocks(samples: Samples, why: np.ndarray, room: int) -> tuple[dict[str, bytes], int | None]:
    """Return the blocks of the samples, one row each, and of their texts; and the length in characters to which the
    responses were cut, None where they are whole.

    Args:
        why: a `Choice` for each sample.
        room: size of all blocks in bytes; responses are cut until they fit.
    """
    prompts = samples.rows.column("prompt").combine_chunks().dictionary_encode()
    packed = [block.to_bytes() for block in text_blocks("text", prompts.dictionary, _TEXTS_OF_A_BLOCK)]
    room -= sum(map(len, packed))
    most, whole = _TEXTS, samples.rows.column("response")
    while True:  # until they fit: how well texts pack is known when they are packed
        responses, cut = shortened(whole, most)
        answers = [block.to_bytes() for block in text_blocks("text", responses, _TEXTS_OF_A_BLOCK)]
        size = sum(map(len, answers))
        if size <= room or cut is None or most < 2**20:
            break
        most = min(most, _size(responses)) * room * 9 // size // 10
    rows = _rows(samples.rows, prompts, why, cut, {"prompts": len(packed), "responses": len(answers)})
    numbered = {"prompts": packed, "responses": answers}
    texts = {f"{name}-{number}": data for name, blocks in numbered.items() for number, data in enumerate(blocks)}
    return {"samples": rows.to_bytes(), **texts}, cut


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
    block.numbers("response_cut", (lengths > (np.inf if cut is None else cut)).astype(np.uint8))
    block.value("prompts", len(prompts.dictionary))
    block.value("blocks", dict(counts))
    block.value("cut", cut)
    return block


def detail_blocks(
    ledger: Ledger, samples: Samples, chosen: np.ndarray, tokens: pa.Table, texts: Texts | None
) -> dict[str, bytes]:
    """Return the blocks of the tokens and turns of chosen samples.

    Args:
        chosen: rows of the samples.
        tokens: as `read_tokens` returns them.
        texts: as `token_texts` returns them.
    """
    of_samples, of_tokens = token_blocks(tokens, texts)
    turns = turn_block(_episodes(ledger, samples, chosen))
    return {"token-samples": of_samples.to_bytes(), "token-values": of_tokens.to_bytes(), "turns": turns.to_bytes()}


def token_texts(ledger: Ledger, samples: Samples, tokens: pa.Table) -> Texts | None:
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


def _episodes(ledger: Ledger, samples: Samples, chosen: np.ndarray) -> dict[int, EpisodeView]:
    """Return the episodes of chosen samples, by row. Those whose tables are lost are left out: the samples' notes say
    so."""
    names = ("group_id", "sample_index", "iteration", "shard")
    columns = [samples.rows.column(name).take(pa.array(chosen)).to_pylist() for name in names]
    keys = list(zip(*columns[:2], strict=True))
    rows = dict(zip(keys, chosen.tolist(), strict=True))
    views = episodes(ledger, dict(zip(keys, zip(*columns[2:], strict=True), strict=True)), skip_lost=True)
    return {rows[key]: view for key, view in sorted(views.items(), key=lambda item: rows[item[0]])}
