"""What `verify --evals` and `gc --evals` do and print."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from cairn.flows.cli import tables
from cairn.flows.cli.app import FAILED, print_json, say

if TYPE_CHECKING:
    from cairn.storage.signatures import Signed
    from cairn.storage.store import Store


def verify_evals(store: "Store", signers: Mapping[str, str], json: bool) -> None:
    """Read all results again, and where there are signers all signatures; exits with 1 if something is wrong."""
    from cairn.storage.evals_upkeep import verify

    checks = list(tables.with_progress(verify(store), hidden=json))
    findings = [finding for check in checks for finding in check.findings]
    signed = _signed(store, signers) if signers else []
    unsigned = [one for one in signed if one.problem]
    files, size = sum(check.files for check in checks), sum(check.bytes for check in checks)
    if json:
        found = [finding.model_dump(mode="json") for finding in findings]
        found += [{"fault": "unsigned", "path": one.path, "message": one.problem} for one in unsigned]
        wrote = {"signers": {one.path: one.signer for one in signed if one.signer}} if signers else {}
        print_json({"results": len(checks), "files": files, "bytes": size, **wrote, "findings": found})
    else:
        for finding in findings:
            say(f"{finding.fault}: {finding.message}")
        verdict = f"{len(findings)} findings" if findings else "every byte is what was committed"
        say(f"evaluations: {len(checks)} results, {files} files, {size / 1e6:.1f} MB read; {verdict}")
        if signers:
            tables.print_signed(signed)
    if findings or unsigned:
        raise typer.Exit(FAILED)


def _signed(store: "Store", signers: Mapping[str, str]) -> list["Signed"]:
    from cairn.storage.signatures import check_result_signatures

    return list(check_result_signatures(store, signers))


def gc_evals(store: "Store", apply: bool, json: bool) -> None:
    """Find what nobody needs, and remove it if asked to."""
    from cairn.storage.evals_upkeep import collect, garbage

    found = list(garbage(store))
    if apply:
        collect(store, found)
    if json:
        print_json({"removed": apply, "garbage": [one.model_dump(mode="json") for one in found]})
        return
    for one in found:
        say(f"{one.reason}: {one.path}")
    size = sum(one.bytes or 0 for one in found) / 1e6
    end = "removed" if apply else "can go; `cairn gc --evals --apply` removes them" if found else "can go"
    say(f"evaluations: {len(found)} files, {size:.1f} MB, {end}")
