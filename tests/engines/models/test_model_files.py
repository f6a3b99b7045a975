"""The digest of a model folder; special tokens as its files tell them, against those that transformers finds."""

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from cairn.engines.models.files import folder_digest, special_tokens
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.storage.store import canonical
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
    result, counted = special_tokens(tmp_path), set(load_tokenizer(str(tmp_path)).all_special_tokens)
    assert result is not None
    assert result >= counted >= {"</think>", "<begin>", "<unknown>", "<|im_end|>"}
    assert result >= {"<old>", "<class>"}
    assert "<tool>" not in result


LOADED = ("config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja")
BESIDE = (
    ".cache/huggingface/download/config.json.metadata",
    ".git/HEAD",
    "README.md",
    "original/params.json",
    "run.log",
)


def write(folder: Path, *names: str, content: str = "0") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def of_all_files(folder: Path) -> str:
    """As earlier versions recorded it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return canonical.digest([[str(f.relative_to(folder)), hashlib.sha256(f.read_bytes()).hexdigest()] for f in files])


def test_the_digest_is_of_the_files_that_a_loader_reads(tmp_path: Path) -> None:
    write(tmp_path, *LOADED)
    digest = folder_digest(tmp_path)
    assert digest == of_all_files(tmp_path)
    write(tmp_path, *BESIDE)
    assert folder_digest(tmp_path) == digest
    for name in LOADED:
        write(tmp_path, name, content="1")
        assert folder_digest(tmp_path) != digest
        write(tmp_path, name)


def test_the_digest_of_all_files_that_an_earlier_version_recorded_counts_too(tmp_path: Path) -> None:
    write(tmp_path, *LOADED, *BESIDE)
    recorded = of_all_files(tmp_path)
    assert folder_digest(tmp_path) != recorded
    assert folder_digest(tmp_path, recorded) == recorded
    write(tmp_path, "config.json", content="1")
    assert folder_digest(tmp_path, recorded) not in (recorded, of_all_files(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"added_tokens": [{}]}', '{"added_tokens": null}'])
def test_where_they_cannot_be_told_nobody_is_told_that_there_are_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert special_tokens(tmp_path) is None
