"""The files of docs/plugins.md and docs/agents.md are what their kinds of code take."""

import re
from pathlib import Path

from cairn.configs.kinds import KINDS, TOOL, Kind
from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.staleness import stale_weights
from tests.docs.examples import examples_of

EXAMPLES = examples_of("plugins.md") | examples_of("agents.md")
WITHOUT_KIND = {"agent.py", "shop.py"}
"""A program of its own, and a server of tools."""


def kinds_of(path: Path, code: str) -> list[Kind]:
    """Kinds whose function the file defines as they take it."""
    found = []
    for kind in KINDS:
        if re.search(rf"^(async )?def {kind.function}\(", code, re.MULTILINE):
            try:
                kind.load(f"{path}:{kind.function}")
                found.append(kind)
            except BadPlugin:
                pass
    return found


def test_every_file_is_of_some_kind_and_every_kind_has_a_file(tmp_path: Path) -> None:
    found = {}
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
        found[name] = kinds_of(tmp_path / name, code)
    assert {name for name, kinds in found.items() if not kinds} == WITHOUT_KIND
    shown = {kind.name for kinds in found.values() for kind in kinds}
    assert {kind.name for kind in KINDS if kind is not TOOL} == shown


def test_the_staleness_policy_of_the_page_gives_a_weight_or_none(tmp_path: Path) -> None:
    path = tmp_path / "mostly_young.py"
    path.write_text(EXAMPLES["mostly_young.py"])
    assert stale_weights(f"{path}:weigh", {0: 3, 2: 1, 3: 2}, 1) == (0.0, 0.0)
    assert stale_weights(f"{path}:weigh", {0: 3, 3: 4}, 1) is None
