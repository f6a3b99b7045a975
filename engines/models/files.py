"""Files of a model folder, read without the libraries that load models and tokenizers, which take seconds to import."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json

_TOKENIZER = "tokenizer.json"
_OTHERS = ("tokenizer_config.json", "special_tokens_map.json")


TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*preprocessor_config.json",  # how images are seen
    "processor_config.json",
)
"""Patterns of the files that a folder's tokenizer is read from."""

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "*quant*_config.json",
)


def matching_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a model folder that match patterns, in the order of their names."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not path.name.startswith(("consolidated", ".")))


def loaded_files(folder: Path) -> list[Path]:
    """The files of a model folder that loaders read."""
    return matching_files(folder, (*_MODEL_FILES, *TOKENIZER_FILES))


def folder_digest(folder: Path, recorded: str | None = None) -> str:
    """SHA-256 over names and contents of the files that loaders read; large files are read in parallel. `recorded`: a
    digest that counts as well where it is that of all files, as earlier versions recorded it; it is then returned."""
    digests = _digests(loaded_files(folder))
    found = _joint(folder, digests)
    if recorded in (None, found):
        return found
    others = [path for path in folder.rglob("*") if path.is_file() and path not in digests]
    return recorded if _joint(folder, digests | _digests(others)) == recorded else found


def _digests(files: Sequence[Path]) -> dict[Path, str]:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(digest, files), strict=True))


def _joint(folder: Path, digests: Mapping[Path, str]) -> str:
    return canonical.digest([[str(path.relative_to(folder)), digests[path]] for path in sorted(digests)])


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
