"""What a tokenizer means, however it is written."""

import json
from typing import Any

from cairn.storage import canonical

_NO_MEANING = ("version", "truncation", "padding", "post_processor")
"""Of a tokenizer's JSON: the last adds special tokens, which prompts and responses never ask for."""


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
