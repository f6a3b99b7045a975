"""Writing a report: from a ledger to the file."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from cairn.flows.reading.balance import measured
from cairn.flows.reading.views import run_status
from cairn.flows.report.content import curves_block, detail_blocks, run_values, sample_blocks, token_texts
from cairn.flows.report.data import (
    Choice,
    Progress,
    Samples,
    choose,
    read_groups,
    read_history,
    read_samples,
    read_tokens,
)
from cairn.flows.report.facts import configuration_facts, verification_facts
from cairn.flows.report.page import write_page
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.upkeep.verification import Verified, verify

WITH_TOKENS = 500
"""Number of samples that are shown with their tokens."""
_LARGEST = 50_000_000
"""Target size of the file in bytes."""
_ROOM = 0.72
"""Usable part of a block's share of the file, after base64 overhead and a reserve."""


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
    status, config = run_status(ledger.store, ledger.run), ledger.config
    verification = verification_facts(list(_verified(ledger, progress))) if verified else None
    history = read_history(ledger, progress, price)
    samples = read_samples(ledger, progress)
    groups = read_groups(ledger)
    why = choose(
        samples.rows.column("iteration").to_numpy(),
        samples.rows.column("reward").to_numpy(zero_copy_only=False),
        WITH_TOKENS,
        config.seed,
    )
    chosen = np.flatnonzero(why != Choice.NONE)
    tokens = read_tokens(ledger, samples, chosen.tolist(), progress)
    with_tokens = pc.count_distinct(tokens.column("row")).as_py()
    progress("packing", 0, 0)
    blocks, cut = {"curves": curves_block(history, groups, config).to_bytes()}, None
    if samples.rows.num_rows:
        blocks |= detail_blocks(ledger, samples, chosen, tokens, token_texts(ledger, samples, tokens))
        more, cut = sample_blocks(samples, why, int(_LARGEST * _ROOM) - sum(map(len, blocks.values())))
        blocks |= more
    facts = {
        **run_values(
            ledger,
            status,
            history,
            groups,
            samples.rows.num_rows,
            None if status.imported else measured(ledger, config, status.iterations),
            verification,
            configuration_facts(ledger),
        ),
        "samples": _samples_facts(samples, with_tokens, cut),
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
