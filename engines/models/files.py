"""Files of a model folder.

This module does not import the libraries that load models and tokenizers, because their import takes seconds.
"""

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
"""Patterns of the files from which a folder's tokenizer is read."""

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "*quant*_config.json",
)


def matching_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a model folder that match patterns, sorted by path."""
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if not path.name.startswith(("consolidated", ".")))


def loaded_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that loaders read."""
    return matching_files(folder, (*_MODEL_FILES, *TOKENIZER_FILES))


def folder_digest(folder: Path, recorded: str | None = None) -> str:
    """Return the SHA-256 over names and contents of the files that loaders read. Large files are read in parallel.

    Args:
        recorded: a digest to compare with. Earlier versions digested all files of the folder; where `recorded` is such
            a digest and still fits, it is returned.
    """
    digests = _digests(loaded_files(folder))
    digest = _joint(folder, digests)
    if recorded in (None, digest):
        return digest
    others = [path for path in folder.rglob("*") if path.is_file() and path not in digests]
    return recorded if _joint(folder, digests | _digests(others)) == recorded else digest


def _digests(files: Sequence[Path]) -> dict[Path, str]:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(digest, files), strict=True))


def _joint(folder: Path, digests: Mapping[Path, str]) -> str:
    return canonical.digest([[str(path.relative_to(folder)), digests[path]] for path in sorted(digests)])


def special_tokens(folder: Path) -> frozenset[str] | None:
    """Return a set of texts that contains every token that the folder's tokenizer files declare special.

    Tokens that the tokenizer's class in transformers adds by itself, such as `<s>`, are missing. Returns None where the
    files cannot be read.
    """
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
    """Yield all texts in a JSON value."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, list | dict):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _texts(one)
