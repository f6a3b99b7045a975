"""Code that a model folder brings along. SGLang runs it wherever it does not know the model's architecture, whatever it
was told with `trust_remote_code`; so a folder that names any is not given to it unasked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.engines.errors import BadModel
from cairn.storage.canonical import from_json


def code_problem(path: str, *options: Mapping[str, Any]) -> str | None:
    """A sentence if the config.json of a model folder names code (`auto_map`) that none of the servers' options trust.

    Raises:
        BadModel: the file is missing or broken.
    """
    if any(of_server.get("trust_remote_code") for of_server in options):
        return None
    file = Path(path) / "config.json"
    try:
        found = _names_code(from_json(file.read_text()))
    except (OSError, ValueError) as error:
        raise BadModel(f"{file} cannot be read: {error}") from error
    if not found:
        return None
    return (
        f"{file} names code of its own (auto_map), which SGLang may run: take auto_map out, or set "
        "rollout.sglang.trust_remote_code=true"
    )


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "auto_map" in value or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))
