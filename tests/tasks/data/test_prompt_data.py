"""What a data file's rows become, and what is said when they cannot be used."""

import copy
import functools
import hashlib
import json
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

import cairn
from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.schema.data import RowFormat
from cairn.engines.models.tokenizers import stop_clock
from cairn.storage.store.errors import NoSpace
from cairn.tasks.data.prompts import PromptData
from tests.small_disk import small_disk, why_not
from tests.tables import cases
from tests.tomorrow import Tomorrow

PLAIN = RowFormat(apply_chat_template=False)
ROWS = [{"prompt": f"prompt {i}", "label": str(i * i), "metadata": {"n": i}} for i in range(10)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


@pytest.fixture
def http_folder(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@cases(("suffix", "place"), product(("jsonl", "parquet"), ("local", "memory", "http", "s3")))
def test_every_format_at_every_url_gives_the_same_rows(tmp_path, tokenizer, http_folder, s3_url, suffix, place):
    local = tmp_path / f"rows.{suffix}"
    (write_jsonl if suffix == "jsonl" else write_parquet)(local, ROWS)
    url = {
        "local": str(local),
        "memory": f"memory://{tmp_path.name}/rows.{suffix}",
        "http": f"{http_folder}/rows.{suffix}",
        "s3": f"{s3_url}/rows.{suffix}",
    }[place]
    if place in ("memory", "s3"):
        with fsspec.open(url, "wb") as file:
            file.write(local.read_bytes())
    data = PromptData.open(PLAIN, url, tokenizer)
    assert len(data) == 10
    assert data.fingerprint == hashlib.sha256(local.read_bytes()).hexdigest()
    for index in (7, 0, 9, 3):
        row = data.row(index)
        assert (row.index, row.prompt, row.label, row.metadata) == (
            index,
            f"prompt {index}",
            str(index**2),
            {"n": index},
        )
        assert tokenizer.decode(row.prompt_ids) == row.prompt_text == f"prompt {index}"


@cases("name", ["a#b.jsonl", "a?b.jsonl", "a%20b.jsonl"])
def test_names_of_any_characters_are_no_fragments_of_urls(tmp_path, tokenizer, s3_url, name):
    local = write_jsonl(tmp_path / name, ROWS)
    with fsspec.open(f"{s3_url}/{name}", "wb") as file:
        file.write(Path(local).read_bytes())
    for url in (local, f"{s3_url}/{name}"):
        assert len(PromptData.open(PLAIN, url, tokenizer)) == len(ROWS)


@cases("slice_", ["[2:5]", "[-3:]", "[:4]", "[:-8]", "[7:100]", "[:]"])
def test_a_slice_takes_the_rows_that_python_would(tmp_path, tokenizer, slice_):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    data = PromptData.open(PLAIN, f"{path}@{slice_}", tokenizer)
    expected = eval(f"list(range(10)){slice_}")
    assert [data.row(i).metadata["n"] for i in range(len(data))] == expected
    assert [data.row(i).index for i in range(len(data))] == list(range(len(expected)))


def test_the_fingerprint_tells_any_two_files_apart(tmp_path, tokenizer):
    one = write_jsonl(tmp_path / "one.jsonl", ROWS)
    two = write_jsonl(tmp_path / "two.jsonl", [*ROWS[:-1], {**ROWS[-1], "label": "82"}])
    assert PromptData.open(PLAIN, one, tokenizer).fingerprint != PromptData.open(PLAIN, two, tokenizer).fingerprint


def test_a_string_becomes_one_user_message_of_the_chat_template(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "hé?", "label": "1"}])
    format = RowFormat(apply_chat_template_kwargs={"suffix": " thinks"})
    row = PromptData.open(format, path, tokenizer).row(0)
    assert row.prompt_text == "<user>hé?<assistant thinks>"
    assert len(row.prompt_ids) == len("<user>hé?<assistant thinks>".encode())


def test_columns_of_json_strings_say_what_plain_ones_do(tmp_path, tokenizer):
    """As dapo-math-17k and slime's data have them: Parquet files whose columns hold JSON."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    plain = [{"prompt": messages, "label": "4", "metadata": {"n": 1}, "tools": [{"name": "add"}]}]
    written = [{name: v if name == "label" else json.dumps(v) for name, v in row.items()} for row in plain]
    format = RowFormat(tool_key="tools")
    expected = PromptData.open(format, write_jsonl(tmp_path / "rows.jsonl", plain), tokenizer).row(0)
    for path in (write_jsonl(tmp_path / "text.jsonl", written), write_parquet(tmp_path / "text.parquet", written)):
        assert PromptData.open(format, path, tokenizer).row(0) == expected


@cases("text", ["[1, 2]", '[{"role": "user"', "[]", '["role"]'])
def test_a_prompt_that_only_looks_like_messages_is_a_prompt(tmp_path, tokenizer, text):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": text, "label": "x"}])
    assert PromptData.open(RowFormat(), path, tokenizer).row(0).prompt == text


@cases("writer", [write_jsonl, write_parquet])
def test_messages_and_tools_reach_the_template_and_tools_the_metadata(tmp_path, tokenizer, writer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}]
    tools = [{"name": "add"}, {"name": "sub"}]
    rows = [{"prompt": messages, "label": None, "metadata": {"n": 1}, "tools": tools}]
    path = writer(tmp_path / ("rows.jsonl" if writer is write_jsonl else "rows.parquet"), rows)
    row = PromptData.open(RowFormat(tool_key="tools"), path, tokenizer).row(0)
    assert row.prompt_text == "<tools>add,sub</tools><system>be brief<user>hi<assistant>"
    assert row.prompt == messages
    assert row.metadata == {"n": 1, "tools": tools}
    assert row.label is None


def test_keys_and_label_pattern_cut_the_answer_out(tmp_path, tokenizer):
    rows = [{"question": "1+1?", "answer": "one and one\n#### 1,002 \n"}]
    format = RowFormat(input_key="question", label_key="answer", label_pattern=r"####\s*(.+)")
    assert PromptData.open(format, write_jsonl(tmp_path / "r.jsonl", rows), tokenizer).row(0).label == "1,002"


OF_MAPPING = {"target": "72"}


@cases(
    ("label", "text"),
    [(72, "72"), (72.0, "72"), (0.5, "0.5"), ("0.50", "0.50"), (None, None), (OF_MAPPING, '{"target": "72"}')],
)
def test_a_label_is_text_or_a_number(tmp_path, tokenizer, label, text):
    for path in (
        write_jsonl(tmp_path / "r.jsonl", [{"prompt": "p", "label": label}]),
        write_parquet(tmp_path / "r.parquet", [{"prompt": "p", "label": label}]),
    ):
        assert PromptData.open(PLAIN, path, tokenizer).row(0).label == text
    huge = write_jsonl(tmp_path / "huge.jsonl", [{"prompt": "p", "label": 10**400}])
    assert PromptData.open(PLAIN, huge, tokenizer).row(0).label == "1" + 400 * "0"


@cases("label", [["72"], True, float("nan"), float("inf")])
def test_a_label_of_another_kind_is_refused(tmp_path, tokenizer, label):
    path = write_jsonl(tmp_path / "r.jsonl", [GOOD, {"prompt": "p", "label": label}])
    with pytest.raises(BadData, match=r"line 2: 'label' is a label and holds .*, which is not text or a number: write"):
        PromptData.open(PLAIN, path, tokenizer)


def test_bytes_of_utf8_are_text_and_others_are_refused(tmp_path, tokenizer):
    rows = [{"prompt": "2 + 2 é".encode(), "label": b"4", "metadata": {"unit": b"m"}}]
    row = PromptData.open(PLAIN, write_parquet(tmp_path / "r.parquet", rows), tokenizer).row(0)
    assert (row.prompt_text, row.label, row.metadata) == ("2 + 2 é", "4", {"unit": "m"})
    path = write_parquet(tmp_path / "bad.parquet", [*rows, {"prompt": b"\xff\x00", "label": b"4"}])
    with pytest.raises(BadData, match=r"bad\.parquet, row 2: 'prompt' holds bytes that are not UTF-8 text: write"):
        PromptData.open(PLAIN, path, tokenizer)


def test_a_function_that_reads_a_file_is_given_its_bytes_as_text_or_data_urls(tmp_path):
    path = write_parquet(tmp_path / "r.parquet", [{"prompt": b"p", "image": {"bytes": b"\xff\x00", "path": None}}])
    assert list(cairn.file_rows(path)) == [{"prompt": "p", "image": {"bytes": "data:;base64,/wA="}}]


def test_fields_that_arrow_adds_to_structs_are_not_there(tmp_path, tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages | tojson }}"
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("f", {"city": "Ulm"}), ("g", {"n": [1, 2]}))
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}],
            "label": "1",
            "metadata": {call["function"]["name"]: {"x": 1}},
            "tools": [{"name": call["function"]["name"], "parameters": {"properties": call["function"]["arguments"]}}],
        }
        for call in calls
    ]
    paths = write_jsonl(tmp_path / "r.jsonl", rows), write_parquet(tmp_path / "r.parquet", rows)
    plain, parquet = (PromptData.open(RowFormat(tool_key="tools"), path, tokenizer) for path in paths)
    assert [parquet.row(i) for i in (0, 1)] == [plain.row(i) for i in (0, 1)]
    assert "null" not in parquet.row(0).prompt_text


def test_arguments_of_tool_calls_as_json_are_mappings(tmp_path, tokenizer):
    def row(arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}], "label": "1"}

    path = write_jsonl(tmp_path / "r.jsonl", [row({"a": 1}), row('{"a": 1}'), row("no JSON")])
    data = PromptData.open(RowFormat(), path, tokenizer)
    assert data.row(1).prompt == data.row(0).prompt
    assert data.row(2).prompt[1]["tool_calls"][0]["function"]["arguments"] == "no JSON"


@cases("writer", [write_jsonl, write_parquet])
def test_parts_of_text_are_joined(tmp_path, tokenizer, writer):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    path = writer(
        tmp_path / f"r.{writer.__name__[6:]}", [{"prompt": [{"role": "user", "content": parts}], "label": "4"}]
    )
    assert PromptData.open(RowFormat(), path, tokenizer).row(0).prompt_text == "<user>What is 2+2?<assistant>"


@cases(
    ("message", "problem"),
    [
        ({"content": []}, r"has the content \[\], which is neither text nor parts of text: correct the row"),
        ({"content": 4}, "has the content 4, which"),
        ({"content": {"text": "hi"}}, "has the content {"),
        ({"content": ["hi"]}, "has the content "),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "has the content "),
        ({"content": None}, "has no content"),
        ({"role": ["user"], "content": "hi"}, "has the role "),
        ({"role": "assistant", "tool_calls": [1]}, "has tool_calls that are not a list of mappings"),
    ],
)
def test_a_message_of_another_kind_is_refused(tmp_path, tokenizer, message, problem):
    rows = [GOOD, {"prompt": [{"role": "user", "content": "a"}, {"role": "user", **message}], "label": "4"}]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    with pytest.raises(BadData, match=f"line 2: message 2 of 'prompt' {problem}"):
        PromptData.open(RowFormat(), path, tokenizer)


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path, tokenizer):
    path = tmp_path / "r.jsonl"
    path.write_text('\n{"prompt": "a", "label": "1"}\n  \n{"prompt": "b", "label": "2"}\n\n')
    data = PromptData.open(PLAIN, str(path), tokenizer)
    assert [data.row(i).prompt for i in range(len(data))] == ["a", "b"]
    path.write_text('{"prompt": "a", "label": "1"}\n\n{"prompt": "b"\n')
    with pytest.raises(BadData, match=r"r\.jsonl, line 3 is not JSON"):
        PromptData.open(PLAIN, str(path), tokenizer)


GOOD = {"prompt": "p", "label": "l"}
MESSAGES = [{"role": "user", "content": "hi"}]


@cases(
    ("rows", "options", "message"),
    [
        ([GOOD, [1]], {}, r"line 2 holds list instead of an object"),
        (
            [GOOD, {"prompt": "p", "answer": 1}],
            {},
            r"line 2 has no field 'label'.*has answer, prompt: set label_key",
        ),
        ([GOOD], {"input_key": "question"}, r"line 1 has no field 'question'.*it has label, prompt: set input_key"),
        ([GOOD, {**GOOD, "prompt": 3}], {}, r"line 2: 'prompt' is neither a string nor a list"),
        ([{**GOOD, "prompt": []}], {}, r"line 1: 'prompt' is neither a string nor a list"),
        ([{**GOOD, "prompt": ["hi"]}], {}, r"line 1: 'prompt' is neither a string nor a list"),
        (
            [{**GOOD, "prompt": MESSAGES}],
            {},
            "line 1: 'prompt' is a list of messages but apply_chat_template is",
        ),
        ([GOOD], {"label_pattern": "#(.)"}, r"line 1: 'label' has no match for label_pattern '#\(\.\)'"),
        ([{**GOOD, "label": None}], {"label_pattern": "(.)"}, r"line 1: 'label' has no match"),
        ([{**GOOD, "metadata": [1]}], {}, r"line 1: 'metadata' is not a mapping"),
        (
            [GOOD, {**GOOD, "metadata": "{"}],
            {},
            r"line 2: 'metadata' is a string, but not a JSON object \(.*\): correct",
        ),
        ([GOOD, {**GOOD, "metadata": "[1]"}], {}, r"line 2: 'metadata' is not a mapping"),
        ([{**GOOD, "tools": "[1"}], {"tool_key": "tools"}, r"line 1: 'tools' is not a list"),
        ([{**GOOD, "tools": ["add"]}], {"tool_key": "tools"}, r"line 1: 'tools' is not a list"),
        ([], {}, r"has no rows"),
    ],
)
def test_a_bad_row_is_named_when_the_file_is_opened(tmp_path, tokenizer, rows, options, message):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(BadData, match=message):
        PromptData.open(PLAIN.model_copy(update=options), path, tokenizer)


class Unpickles(pa.ExtensionType):
    """As libraries have them for objects of Python's."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "cairn.test.unpickles")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> "Unpickles":
        return cls()

    def __arrow_ext_scalar_class__(self) -> type[pa.ExtensionScalar]:
        class Scalar(pa.ExtensionScalar):
            def as_py(self, **options: Any) -> Any:
                raise AssertionError("it could run anything here")

        return Scalar


@pytest.mark.parametrize("nested", [False, True])
def test_values_of_a_librarys_own_type_are_not_made_into_objects(tmp_path, tokenizer, nested):
    column = pa.ExtensionArray.from_storage(Unpickles(), pa.array(["p"]))
    column = pa.StructArray.from_arrays([column], ["text"]) if nested else column
    pq.write_table(pa.table({"prompt": column, "label": ["x"], "unread": column}), tmp_path / "a.parquet")
    pa.register_extension_type(Unpickles())
    try:
        with pytest.raises(BadData, match="has a column 'prompt' of a library's extension type"):
            PromptData.open(PLAIN, str(tmp_path / "a.parquet"), tokenizer)
    finally:
        pa.unregister_extension_type("cairn.test.unpickles")


def test_a_bad_parquet_row_is_named_when_the_file_is_opened(tmp_path, tokenizer):
    missing = write_parquet(tmp_path / "a.parquet", [{"prompt": "p", "other": 1}])
    with pytest.raises(BadData, match=r"a\.parquet has no field 'label'.*it has other, prompt"):
        PromptData.open(PLAIN, missing, tokenizer)
    null = write_parquet(tmp_path / "b.parquet", [GOOD, {"prompt": None, "label": "x"}])
    with pytest.raises(BadData, match=r"b\.parquet, row 2: 'prompt' is neither"):
        PromptData.open(PLAIN, null, tokenizer)
    torn = tmp_path / "c.parquet"
    torn.write_bytes(Path(null).read_bytes()[:-20])
    with pytest.raises(BadData, match=r"c\.parquet is not a whole Parquet file"):
        PromptData.open(PLAIN, str(torn), tokenizer)


def test_a_damaged_page_of_parquet_is_the_files(tmp_path, tokenizer):
    """pyarrow raises OSError here, of which its own exceptions are none."""
    path = tmp_path / "r.parquet"
    table = pa.table({"prompt": [f"question {i}" for i in range(3000)], "label": [str(i) for i in range(3000)]})
    pq.write_table(table, path, compression="snappy", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[2000:2040] = b"\xff" * 40
    path.write_bytes(raw)
    with pytest.raises(BadData, match=r"r\.parquet is not a whole Parquet file \(.*\): copy it again"):
        PromptData.open(PLAIN, str(path), tokenizer)


@cases(
    ("path", "message"),
    [
        ("absent.jsonl", "absent.jsonl does not exist"),
        ("rows.csv", r"rows.csv is neither a .jsonl nor a .parquet"),
        ("rows.jsonl@[20:30]", r"rows.jsonl@\[20:30\] selects none of the 10 rows"),
        ("folder.jsonl", "is a folder"),
        ("nowhere://bucket/rows.jsonl", "nowhere://bucket/rows.jsonl cannot be read"),
        ("memory://absent/rows.jsonl", "memory://absent/rows.jsonl does not exist"),
    ],
)
def test_a_bad_path_is_one_sentence(tmp_path, tokenizer, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "folder.jsonl").mkdir(exist_ok=True)
    with pytest.raises(BadData, match=message):
        PromptData.open(PLAIN, path, tokenizer)


def test_an_object_store_that_has_no_such_file_or_bucket_is_one_sentence(tokenizer, s3_url):
    with pytest.raises(BadData, match=r"absent\.jsonl does not exist: correct the path"):
        PromptData.open(PLAIN, f"{s3_url}/absent.jsonl", tokenizer)
    with pytest.raises(BadData, match=r"rows\.jsonl does not exist: correct the path"):
        PromptData.open(PLAIN, "s3://no-such-bucket-anywhere/rows.jsonl", tokenizer)


def test_missing_credentials_are_one_sentence(tokenizer, s3_url, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(BadData, match=r"rows\.jsonl cannot be read \(.*credentials.*\): check the path and the access"):
        PromptData.open(PLAIN, f"{s3_url}/rows.jsonl", tokenizer)


def test_rows_that_are_not_needed_by_the_reward_may_lack_a_label(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "p"}])
    assert PromptData.open(RowFormat(label_key=None), path, tokenizer).row(0).label is None


def test_whatever_a_template_raises_names_the_row(tmp_path, tokenizer):
    dividing = copy.copy(tokenizer)
    dividing.chat_template = "{% for m in messages %}{{ m.content | int / (m.content | int) }}{% endfor %}"
    unknown_role = [{"role": "nobody", "content": "x"}]
    for renderer, prompt, reason in (
        (tokenizer, unknown_role, r"who is nobody\?"),
        (dividing, "0", "division by zero"),
    ):
        path = write_jsonl(tmp_path / "r.jsonl", [GOOD, {**GOOD, "prompt": prompt}])
        with pytest.raises(BadPrompt, match=rf"r\.jsonl, row 2: the chat template refuses the prompt \({reason}\)"):
            PromptData.open(RowFormat(), path, renderer).row(1)


def test_a_template_that_tells_the_date_tells_that_of_the_stopped_clock(tmp_path, tokenizer, monkeypatch):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}"
    data = PromptData.open(RowFormat(), write_jsonl(tmp_path / "r.jsonl", [GOOD]), tokenizer)
    stop_clock(tokenizer, 1721952000.0)
    assert data.row(0).prompt_text == "26 Jul 2024"
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert data.row(0).prompt_text == "26 Jul 2024"
    assert data.clock_key([data.row(0)]).keys() == {"prompts"}
    assert PromptData.open(PLAIN, data.path, tokenizer).clock_key([]) == {}


@cases("broken", [{"prompt": "smile \ud83d"}, {"label": "\udc00"}])
def test_a_row_with_half_a_character_gives_no_prompt_and_is_named(tmp_path, tokenizer, broken):
    """JSON can write what no tokenizer and no table takes: `"\\ud83d"`, as where an emoji was cut in two."""
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {**GOOD, **broken}, {**GOOD, "metadata": {"k": "\ud83d"}}])
    data = PromptData.open(PLAIN, path, tokenizer)
    with pytest.raises(BadPrompt, match="row 2 holds half of a surrogate pair"):
        data.row(1)
    assert data.row(2).metadata == {"k": "\ud83d"}


def test_a_tokenizer_without_a_template_is_refused_unless_none_is_wanted(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "r.jsonl", ROWS)
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(BadData, match="no chat template: set apply_chat_template to false"):
        PromptData.open(RowFormat(), path, bare)
    assert PromptData.open(PLAIN, path, bare).row(0).prompt_text == "prompt 0"


def test_a_file_changed_in_place_is_not_read_on(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "r.jsonl", ROWS)
    data = PromptData.open(PLAIN, path, tokenizer)
    data.row(1)
    write_jsonl(tmp_path / "r.jsonl", ROWS[::-1])
    with pytest.raises(BadData, match=r"r\.jsonl was changed while it was in use"):
        data.row(1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_is_not_held_in_memory(tmp_path, tokenizer, suffix):
    path = tmp_path / f"big.{suffix}"
    rows = [{"prompt": f"{i:06d}" + "x" * 3000, "label": str(i)} for i in range(10_000)]
    (write_jsonl if suffix == "jsonl" else functools.partial(write_parquet, row_group_size=1000))(path, rows)
    del rows
    tracemalloc.start()
    try:
        data = PromptData.open(PLAIN, str(path), tokenizer)
        assert data.row(9_876).label == "9876"
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 30 MB of prompts: 8 bytes a row are held; while a Parquet file is opened, one batch of rows is alive.
    assert used < 1_000_000
    assert peak < 12_000_000


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_temporary_copy_that_does_not_fit_is_one_sentence(tmp_path, tokenizer, monkeypatch, suffix):
    if reason := why_not():
        pytest.skip(reason)
    local = tmp_path / f"big.{suffix}"
    (write_jsonl if suffix == "jsonl" else write_parquet)(local, ROWS * 500)
    url = f"memory://{tmp_path.name}/big.{suffix}"
    with fsspec.open(url, "wb") as file:
        file.write(local.read_bytes())
    with small_disk(tmp_path / "disk", 2**16) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(NoSpace, match=f"cannot write to {disk}: no space is left there; free some"):
            PromptData.open(PLAIN, url, tokenizer)
