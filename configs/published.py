"""What the `config.json` of published models says, in `models/OWNER/NAME.json`: a recipe can be checked and planned
without a download. Entries that decide nothing of the architecture are left out."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "models"


def published_names() -> list[str]:
    """Of the models whose facts are here, without their owners."""
    return sorted(_repositories())


def published_config(name: str) -> dict[str, Any] | None:
    """The entries of `config.json` of the model `name`, such as Qwen3-4B, under their published names; None for a model
    that is not here."""
    repository = published_repository(name)
    return None if repository is None else json.loads((FOLDER / f"{repository}.json").read_text("utf-8"))


def published_repository(name: str) -> str | None:
    """Where the model `name` is published on the Hugging Face hub, such as Qwen/Qwen3-4B; None for one not here."""
    return _repositories().get(name)


@cache
def _repositories() -> dict[str, str]:
    return {file.stem: f"{file.parent.name}/{file.stem}" for file in FOLDER.glob("*/*.json")}
