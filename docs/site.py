"""MkDocs' hook: which pages the site has besides those of this folder, and in which order.

README.md is its first page, bench/README.md that of the measurements, and the API's is made from what `cairn` exports.
A page that `ORDER` does not name stands at the end, so that none is forgotten.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import cairn

ROOT = Path(__file__).parents[1]
ORDER = {
    "Start": ["index.md", "tutorial.md"],
    "Train": [
        "configuration.md",
        "recipes.md",
        "plan.md",
        "data.md",
        "algorithms.md",
        "moe.md",
        "sft.md",
        "vision.md",
        "rewards.md",
        "plugins.md",
        "agents.md",
        "coming-from-slime.md",
        "importing.md",
    ],
    "Evaluate": ["evaluation.md", "benchmarks.md", "export.md"],
    "Operate": ["operations.md", "gpus.md", "prefect.md", "artifacts.md", "recovery.md", "decisions.md", "security.md"],
    "Look": ["metrics.md", "tracking.md", "board.md", "report.md", "sql.md", "views.md", "audit.md", "traces.md"],
    "Engines": [
        "models.md",
        "weights.md",
        "libraries.md",
        "engines/transformers.md",
        "engines/sglang.md",
        "engines/torch.md",
        "engines/megatron.md",
    ],
    "Reference": ["api.md", "architecture.md", "iteration.md", "measurements.md"],
}
MORE = "More"


def on_config(config: Any) -> Any:
    """Order the pages that there are."""
    docs = ROOT / "docs"
    there = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} | {"index.md", "api.md", "measurements.md"}
    listed = {section: [page for page in pages if page in there] for section, pages in ORDER.items()}
    rest = sorted(there - {page for pages in ORDER.values() for page in pages})
    config["nav"] = [{section: pages} for section, pages in (listed | {MORE: rest}).items() if pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere or are made."""
    pages = {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "measurements.md": (ROOT / "bench" / "README.md").read_text("utf-8"),
        "api.md": api_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between pages go where these lie on the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)*bench/README\.md", f"]({up}measurements.md", markdown)
    if page.file.src_uri == "index.md":
        return markdown.replace("](docs/", "](")
    return re.sub(r"\]\((?:\.\./)+(?:README\.md)", f"]({up}index.md", markdown)


def api_page() -> str:
    """What user code imports, by its docstrings."""
    parts = ["# What `cairn` exports", "All of it is imported as `from cairn import …`."]
    for name in sorted(cairn.__all__, key=str.lower):
        value = getattr(cairn, name)
        module = getattr(value, "__module__", None) or importlib.import_module(value.__name__).__name__
        parts.append(f"::: {module}.{getattr(value, '__qualname__', name)}\n    options: {{heading: {name}}}")
    return "\n\n".join(parts) + "\n"
