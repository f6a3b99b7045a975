"""The tokenizer of a model folder, and what it means, however it is written."""

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

_NO_MEANING = ("version", "truncation", "padding", "post_processor")
"""Of a tokenizer's JSON: the last adds special tokens, which prompts and responses never ask for."""

_CLOCK = "strftime_now"
"""What chat templates call for the time; an argument of that name goes before the library's."""


def read_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer of a model folder, whose code is not run. It is found by the model's config, also
    where the library has no class for that. Raises what the library raises."""
    from transformers import AutoTokenizer  # takes seconds, and the digest needs none of it

    from cairn.engines.models.folders import ARCHITECTURE_OF, read_config

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    file = Path(folder) / "config.json"
    if file.is_file() and from_json(file.read_text()).get("model_type") in ARCHITECTURE_OF:
        options["config"] = read_config(Path(folder))
    return AutoTokenizer.from_pretrained(folder, **options)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """All tokens that a Hugging Face tokenizer calls special, also those that only its tokenizer.json does, such as
    `<end_of_turn>` of Gemma 3."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({*tokenizer.all_special_ids, *(id for id, token in added if token.special)})


def after_reply(tokenizer: Any, special: Collection[int], ids: Sequence[int] | np.ndarray, written: str) -> str:
    """What a prompt has behind a reply's tokens: `written`, which a chat template writes behind its words, without
    the special tokens that the reply itself ends with. Those may be the end of a turn or, as in GLM-4.5, the beginning
    of the next."""
    ends = list(takewhile(lambda id: id in special, map(int, reversed(ids))))[::-1]
    texts = (tokenizer.decode(ends[start:], skip_special_tokens=False) for start in range(len(ends)))
    return next((written[len(text) :] for text in texts if written.startswith(text)), written)


def reads_clock(tokenizer: Any) -> bool:
    """Whether the chat template tells the time."""
    return _CLOCK in json.dumps(getattr(tokenizer, "chat_template", None))


def stop_clock(tokenizer: Any, now: float) -> None:
    """Let the chat template of a Hugging Face tokenizer take `now`, in Unix seconds, for the time, in UTC: what it
    renders is then the same whenever it is asked."""
    if reads_clock(tokenizer):
        clock = partial(_strftime, now)
        tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, **{_CLOCK: clock})


def _strftime(now: float, format: str) -> str:
    return datetime.fromtimestamp(now, UTC).strftime(format)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of all of a Hugging Face tokenizer that changes which tokens a prompt becomes or which text
    tokens become: vocabulary, merges, normalisation, splitting, decoding, added and special tokens, chat template.
    Equal for a tokenizer that was saved again by another version or with other padding."""
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
    return {name: value for name, value in fields.items() if name not in _NO_MEANING}


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a model folder. Raises BadModel."""
    try:
        tokenizer = read_tokenizer(path)
    # The library reports a broken tokenizer with whatever its many tokenizer classes raise.
    except Exception as error:
        why = str(error).partition("\n")[0].rstrip(": ")
        raise BadModel(f"{path} has no tokenizer that can be loaded ({why}): put the model's own there") from error
    # Without files the library makes up a tokenizer without words.
    if not tokenizer("0")["input_ids"]:
        raise BadModel(f"{path} has no tokenizer: put the model's own there, beside its weights")
    return tokenizer
