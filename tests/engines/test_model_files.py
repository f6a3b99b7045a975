"""Special tokens as files tell them, against those that transformers finds."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from cairn.engines.model_files import special_tokens
from cairn.flows.driver.validation import load_tokenizer
from examples.quickstart.model import build_tokenizer


def test_all_that_transformers_counts_as_special_is_among_them(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["2 + 2 = 4"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"], "bos_token": "<begin>"})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    named = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    named["added_tokens_decoder"] = {"900": {"content": "<old>", "special": True}}
    named["unk_token"] = {
        "__type": "AddedToken",
        "content": "<unknown>",
        "special": False,
    }  # its name makes it one all the same
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"cls_token": "<class>"}))
    found, counted = special_tokens(tmp_path), set(load_tokenizer(str(tmp_path)).all_special_tokens)
    assert found is not None
    assert found >= counted >= {"</think>", "<begin>", "<unknown>", "<|im_end|>"}
    assert found >= {"<old>", "<class>"}
    assert "<tool>" not in found


@pytest.mark.parametrize("content", [None, "{", "[]", '{"added_tokens": [{}]}', '{"added_tokens": null}'])
def test_where_they_cannot_be_told_nobody_is_told_that_there_are_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert special_tokens(tmp_path) is None
