"""The libraries that a report brings along are those that are recorded, with nothing added."""

import hashlib
import re
from pathlib import Path

from cairn.flows.report import page

VENDOR = Path(page.__file__).parent / "vendor"


def test_every_library_is_the_one_recorded_and_has_its_licence() -> None:
    record = (VENDOR / "README.md").read_text()
    recorded = dict(re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", record, re.MULTILINE))
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir()}
    del found["README.md"]
    assert recorded == found
    for name in ("uPlot", "Tabulator"):
        assert "MIT License" in (VENDOR / f"LICENSE.{name}").read_text()


def test_the_page_names_the_versions_that_are_recorded() -> None:
    record, html = (
        (folder / name).read_text() for folder, name in ((VENDOR, "README.md"), (VENDOR.parent, "assets/page.html"))
    )
    for package, name in {"uplot": "uPlot", "tabulator-tables": "Tabulator"}.items():
        (version,) = set(re.findall(rf"\| {package} ([0-9.]+) \|", record))
        assert f"{name} {version}" in html
