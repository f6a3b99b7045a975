"""Rows that a function of the user's gives are those of a file, and are held to what they were."""

import json
from pathlib import Path

import pytest

from cairn.configs.errors import BadData
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.data import RowFormat
from cairn.tasks.data.prompts import PromptData
from tests.tasks.data.test_prompt_data import ROWS, write_jsonl, write_parquet


def opened(folder: Path, code: str, path: str, tokenizer) -> PromptData:
    (folder / "source.py").write_text(code)
    format = RowFormat(apply_chat_template=False, data_source_path=f"{folder / 'source.py'}:rows")
    return PromptData.open(format, path, tokenizer)


WRAPPING = "import cairn\n\n\ndef rows(path):\n    yield from cairn.file_rows(path)\n"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_source_gives_the_prompts_that_the_file_would(tmp_path, tokenizer, write):
    path = write(tmp_path / f"rows.{'jsonl' if write is write_jsonl else 'parquet'}", ROWS) + "@[2:7]"
    mine = opened(tmp_path, WRAPPING, path, tokenizer)
    files = PromptData.open(RowFormat(apply_chat_template=False), path, tokenizer)
    assert [mine.row(i) for i in range(len(mine))] == [files.row(i) for i in range(5)]


def test_the_digest_is_of_what_it_gives_in_its_order(tmp_path, tokenizer):
    code = "import json\n\n\ndef rows(path):\n    return json.loads(open(path).read())\n"

    def fingerprint(rows):
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        return opened(tmp_path, code, str(tmp_path / "rows.json"), tokenizer).fingerprint

    assert fingerprint(ROWS) == fingerprint(ROWS)
    assert len({fingerprint(rows) for rows in (ROWS, ROWS[::-1], ROWS[:9], [*ROWS[:9], {**ROWS[9], "n": 1}])}) == 4


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "yield {'prompt': 'a', 'label': 'b'}; yield 7",
            r"rows' returned int as row 2 of anything: let it be a mapping",
        ),
        ("yield {'prompt': 'a', 'label': {1, 2}}", r"row 1 is not JSON \(.*set.*\): let the data source give JSON"),
        ("yield {'prompt': 'a', 'label': 'b'}; 1 / 0", r"failed on anything after 1 rows with ZeroDivisionError"),
        ("yield {'prompt': 'a'}", r"anything, row 1 has no field 'label'"),
        ("return []", r"anything has no rows"),
        ("return 3", r"failed on anything after 0 rows with TypeError"),
    ],
)
def test_a_source_that_gives_something_else_is_named(tmp_path, tokenizer, body, says):
    with pytest.raises(BadData, match=says):
        opened(tmp_path, f"def rows(path):\n    {body}\n", "anything", tokenizer)


def test_an_unknown_source_is_named_beside_ours(tmp_path, tokenizer):
    format = RowFormat(apply_chat_template=False, data_source_path="file")
    with pytest.raises(
        BadPlugin, match="there is no data source 'file': use one of csv, files, reasoning_gym, package"
    ):
        PromptData.open(format, "anything", tokenizer)
