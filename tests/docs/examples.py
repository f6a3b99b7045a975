"""Code of the examples on a page."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def examples_of(page: str) -> dict[str, str]:
    """Return the page's Python blocks that begin with the name of their file, by that name."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL))


def write_examples(page: str, folder: Path) -> Path:
    """Write the page's examples into a folder, and return it."""
    for name, code in examples_of(page).items():
        (folder / name).write_text(code)
    return folder
