"""Files of a model folder, read without the libraries that load models and tokenizers, which take seconds to import."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cairn.storage import canonical
from cairn.storage.canonical import from_json

_TOKENIZER = "tokenizer.json"
_OTHERS = ("tokenizer_config.json", "special_tokens_map.json")


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files; large files are read in parallel."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest, files))
    return canonical.digest(
        [[str(path.relative_to(folder)), value] for path, value in zip(files, digests, strict=True)]
    )


def special_tokens(folder: Path) -> frozenset[str] | None:
    """Texts among which are all tokens that the files of a folder's tokenizer call special; not those that its class in
    transformers adds by itself, such as `<s>`. None where they cannot be told."""
    try:
        added = from_json((folder / _TOKENIZER).read_bytes())["added_tokens"]
        others = [from_json(file.read_bytes()) for name in _OTHERS if (file := folder / name).is_file()]
        for other in others:
            other.pop("chat_template", None)
            added += other.pop("added_tokens_decoder", {}).values()
        return frozenset(_texts([token for token in added if token["special"]] + others))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _texts(part: Any) -> Iterator[str]:
    """All texts in a part of JSON."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, list | dict):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _texts(one)
