"""The tokenizer of a model folder, and a digest of its behaviour that does not depend on how it was saved."""

import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from cairn.engines.types.errors import BadModel
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json

_IGNORED_FIELDS = ("version", "truncation", "padding", "post_processor")
"""Fields of tokenizer.json that do not change the digest. `post_processor` adds special tokens, and prompts and
responses are always tokenized without them."""

_CLOCK = "strftime_now"
"""Function that chat templates call for the time. An argument of this name overrides the library's function."""


def read_tokenizer(folder: str | Path) -> Any:
    """Return the Hugging Face tokenizer of a model folder without running code of the folder.

    The model's config selects the class, also for model types that are read as another (`ARCHITECTURE_OF`,
    `LANGUAGE_MODEL_OF`).
    Raises whatever the library raises.
    """
    from transformers import AutoTokenizer  # takes seconds, and the digest needs none of it

    from cairn.engines.models.configs import ARCHITECTURE_OF, LANGUAGE_MODEL_OF
    from cairn.engines.models.folders import read_config

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    file = Path(folder) / "config.json"
    if file.is_file() and from_json(file.read_text()).get("model_type") in {*ARCHITECTURE_OF, *LANGUAGE_MODEL_OF}:
        options["config"] = read_config(Path(folder))
    return AutoTokenizer.from_pretrained(folder, **options)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return all special tokens of a Hugging Face tokenizer, also those that only its tokenizer.json declares, such as
    `<end_of_turn>` of Gemma 3."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({*tokenizer.all_special_ids, *(id for id, token in added if token.special)})


def text_after_reply(tokenizer: Any, special: Collection[int], ids: Sequence[int] | np.ndarray, written: str) -> str:
    """Return the text that a prompt has after a reply's tokens.

    `written` is the text that the chat template writes after the reply's words. Special tokens with which the reply
    itself ends are removed from its beginning. They may be the end of a turn or, as in GLM-4.5, the beginning of the
    next.
    """
    ends = list(takewhile(lambda id: id in special, map(int, reversed(ids))))[::-1]
    texts = (tokenizer.decode(ends[start:], skip_special_tokens=False) for start in range(len(ends)))
    return next((written[len(text) :] for text in texts if written.startswith(text)), written)


def reads_clock(tokenizer: Any) -> bool:
    """Whether the chat template uses the current time."""
    return _CLOCK in json.dumps(getattr(tokenizer, "chat_template", None))


def stop_clock(tokenizer: Any, now: float) -> None:
    """Fix the time that a Hugging Face tokenizer's chat template uses to `now`, in Unix seconds, shown in UTC.

    The template then renders the same text at any time.
    """
    if reads_clock(tokenizer):
        clock = partial(_strftime, now)
        tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, **{_CLOCK: clock})


def _strftime(now: float, format: str) -> str:
    return datetime.fromtimestamp(now, UTC).strftime(format)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256, in hex, of all parts of a Hugging Face tokenizer that affect encoding or decoding:
    vocabulary, merges, normalisation, splitting, decoding, added and special tokens, chat template.

    The digest is equal for a tokenizer that another version saved again, or that has other padding.
    """
    return canonical.digest(
        {
            "model": _model(tokenizer),
            "special_ids": sorted(tokenizer.all_special_ids),
            "named": {name: str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "unk_token")},
            "chat_template": tokenizer.chat_template,
            "cleans_up": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        }
    )


def _model(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one in Python: its class is how it splits
        return [type(tokenizer).__name__, tokenizer.get_vocab()]
    fields = json.loads(backend.to_str())
    return {name: value for name, value in fields.items() if name not in _IGNORED_FIELDS}


def load_tokenizer(path: str | Path) -> Any:
    """Return the Hugging Face tokenizer of a model folder. Raises BadModel."""
    try:
        tokenizer = read_tokenizer(path)
    # The library's many tokenizer classes may raise any exception for a broken tokenizer.
    except Exception as error:
        why = str(error).partition("\n")[0].rstrip(": ")
        raise BadModel(f"{path} has no tokenizer that can be loaded ({why}): put the model's own there") from error
    # Without files the library creates a tokenizer with an empty vocabulary.
    if not tokenizer("0")["input_ids"]:
        raise BadModel(f"{path} has no tokenizer: put the model's own there, next to its weights")
    return tokenizer
