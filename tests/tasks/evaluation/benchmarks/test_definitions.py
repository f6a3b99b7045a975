"""Benchmarks that Cairn comes with, and those in files of one's own."""

import json
from pathlib import Path

import pytest

from cairn.configs.catalogue import benchmark_names, load_benchmark
from cairn.configs.errors import BadData, ConfigError
from cairn.tasks.evaluation.benchmarks.rows import (
    BenchmarkRows,
    benchmark_digests,
    benchmark_grader,
    graded_part,
    local_data,
    open_prompts,
    require_data,
)
from tests.tables import cases

SHARED = Path(__file__).parents[4].parent / "shared" / "data"
GSM8K = SHARED / "gsm8k" / "test.jsonl"
AIME = SHARED / "aime24" / "test.jsonl"
needs_rows = pytest.mark.skipif(
    not AIME.exists(), reason=f"the data sets are not part of the project; put them in {SHARED}"
)


def on(name: str, data: Path | str, **changes):
    return load_benchmark(name, {"source": {"data": str(data)}, **changes})


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


class Tokenizer:
    """Writes each turn on a line of its own, and takes every character for a token."""

    chat_template, name_or_path = "", "plain"

    def __init__(self, chat: bool) -> None:
        self.chat_template = "turns" if chat else ""

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"

    def __call__(self, text, **_):
        return {"input_ids": [ord(char) for char in text]}


@pytest.mark.parametrize("name", benchmark_names())
def test_every_benchmark_loads_has_a_grader_that_is_there_and_a_source_at_a_fixed_commit(name, no_cache):
    benchmark = load_benchmark(name)
    assert benchmark.name == name
    assert benchmark_grader(benchmark).version
    assert local_data(benchmark) is None
    if name != "file":
        assert benchmark.follows is not None
        assert len(benchmark.source.revision or "") == 40
        with pytest.raises(BadData, match=f"hf download {benchmark.source.dataset} .*{benchmark.source.revision}"):
            require_data(benchmark)
    else:
        with pytest.raises(BadData, match="--data"):
            require_data(benchmark)


def test_rows_are_found_in_the_cache_of_hugging_face(no_cache):
    benchmark = load_benchmark("math500")
    folder = no_cache / "datasets--HuggingFaceH4--MATH-500" / "snapshots" / str(benchmark.source.revision)
    folder.mkdir(parents=True)
    row = {"problem": "What is $1+1$?", "answer": "2", "unique_id": "test/algebra/1.json"}
    (folder / "test.jsonl").write_text(json.dumps(row))
    assert BenchmarkRows.open(benchmark).read(0) == {
        "prompt": [
            {
                "role": "user",
                "content": "What is $1+1$?\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
            }
        ],
        "label": "2",
        "metadata": {"id": "test/algebra/1.json"},
    }


@needs_rows
def test_gsm8k_asks_real_rows_in_a_chat_and_after_five_examples():
    zero = open_prompts(on("gsm8k", GSM8K), Tokenizer(chat=True))
    assert len(zero) == 1319
    first = zero.row(0)
    assert first.label == "18"
    assert first.prompt_text.startswith("<user>Question: Janet’s ducks lay 16 eggs per day.")
    assert first.prompt_text.endswith("\nAnswer:\n<assistant>")
    five = open_prompts(on("gsm8k-5shot", f"{GSM8K}@[0:2]"), Tokenizer(chat=False))
    assert (len(five), five.row(1).label) == (2, "3")
    text = five.row(0).prompt_text
    assert text.count("Question: ") == text.count("\nAnswer:") == 6
    assert text.count("\n#### ") == 5
    assert "\nAnswer: Natalia sold 48/2 = <<48/2=24>>24 clips in May." in text
    assert text.endswith("farmers' market?\nAnswer:")
    train = [json.loads(line) for line in GSM8K.with_name("train.jsonl").open()][:5]
    shown = [(example.question, example.answer) for example in load_benchmark("gsm8k-5shot").prompt.examples]
    assert shown == [(f"Question: {row['question']}\nAnswer:", row["answer"]) for row in train]


@needs_rows
@pytest.mark.parametrize("year", [2024, 2025])
def test_aime_asks_real_rows_and_keeps_their_ids(year):
    prompts = open_prompts(on(f"aime{year}", AIME), Tokenizer(chat=True))
    assert len(prompts) == 30
    row = prompts.row(0)
    assert row.metadata == {"id": "60"}
    assert "\\boxed{}" in row.prompt_text
    assert all(0 <= int(prompts.row(index).label or "") <= 999 for index in range(30))


def write_gpqa(path: Path, rows: int) -> Path:
    """Made up: the real questions are not to be shown."""
    head = '"Record ID",Question,"Correct Answer","Incorrect Answer 1","Incorrect Answer 2","Incorrect Answer 3"\n'
    body = "".join(f'rec{i},"Which,\n{i}?",right {i}, wrong a,wrong b,wrong c\n' for i in range(rows))
    path.write_text(head + body)
    return path


def test_choices_stand_in_an_order_that_follows_from_the_rows_id(tmp_path):
    opened = BenchmarkRows.open(on("gpqa-diamond", write_gpqa(tmp_path / "gpqa_diamond.csv", 40)))
    rows = [opened.read(index) for index in range(40)]
    for index, row in enumerate(rows):
        (message,) = row["prompt"]
        assert f"({row['label']}) right {index}\n" in message["content"]
        assert "question:Which,\n" in message["content"]
        assert "(A) wrong" in message["content"] or row["label"] == "A"
    assert {row["label"] for row in rows} == set("ABCD")
    alone = BenchmarkRows.open(on("gpqa-diamond", f"{tmp_path / 'gpqa_diamond.csv'}@[7:8]"))
    assert alone.read(0) == rows[7]


def test_a_response_is_graded_up_to_the_question_that_a_base_model_goes_on_with():
    benchmark = load_benchmark("gsm8k-5shot")
    assert graded_part(benchmark, " 5\n#### 5\n\nQuestion: What?</s>") == " 5\n#### 5\n\n"
    assert graded_part(benchmark, " 5\n#### 5") == " 5\n#### 5"


def test_any_file_of_prompts_with_labels_is_a_benchmark(tmp_path):
    rows = [{"prompt": "1+1", "label": 2}, {"prompt": [{"role": "user", "content": "2+2"}], "label": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = open_prompts(on("file", tmp_path / "rows.jsonl"), Tokenizer(chat=True))
    assert [(row.prompt_text, row.label) for row in map(prompts.row, range(2))] == [
        ("<user>1+1\n<assistant>", "2"),
        ("<user>2+2\n<assistant>", "4"),
    ]


def test_what_does_not_fit_is_said_in_a_sentence(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"query": "1+1", "answer": "#### 2"}\n')
    with pytest.raises(
        BadData, match=r"line 1 does not fit the benchmark's prompt \('question' is undefined\); it has"
    ):
        BenchmarkRows.open(on("gsm8k", tmp_path / "rows.jsonl"))
    with pytest.raises(BadData, match=r"the label has no match for columns.label_pattern '\(x\)'"):
        BenchmarkRows.open(
            on(
                "gsm8k",
                tmp_path / "rows.jsonl",
                prompt={"template": "{{ query }}"},
                columns={"label": "answer", "label_pattern": "(x)"},
            )
        )
    with pytest.raises(BadData, match=r"no field 'unique_id', which columns.id names"):
        BenchmarkRows.open(on("math500", tmp_path / "rows.jsonl"))
    with pytest.raises(BadData, match="no chat template"):
        open_prompts(on("gsm8k", tmp_path / "rows.jsonl"), Tokenizer(chat=False))
    with pytest.raises(ConfigError, match="no benchmark 'gsm'"):
        load_benchmark("gsm")
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ntitle: mine\nprompt: {template: '{{ x'}\nsampling: {n: 4, max_tokens: 0, seed: 1}\n")
    with pytest.raises(ConfigError) as refused:
        load_benchmark(str(mine))
    assert [problem.split(" ")[1] for problem in refused.value.problems] == [
        "prompt.template",
        "sampling.max_tokens",
        "sampling.seed",
        "grader",
    ]
    (tmp_path / "torn.csv").write_text("Question\none,two\n")
    with pytest.raises(BadData, match="row 1 has more or fewer values"):
        BenchmarkRows.open(on("gpqa-diamond", tmp_path / "torn.csv"))


@cases(
    ("row", "problem"),
    [
        ({"question": "1", "answer": ["#### 1"]}, r"line 1: 'answer' is a label and holds \[\"#### 1\"\], which is no"),
        ({"question": 1, "answer": "#### 1"}, "line 1 does not fit the benchmark's prompt .*'int'.*; it has question"),
    ],
)
def test_a_label_of_another_kind_and_whatever_a_template_raises_are_the_rows(tmp_path, row, problem):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadData, match=problem):
        BenchmarkRows.open(on("gsm8k", tmp_path / "rows.jsonl", prompt={"template": "{{ question + '?' }}"}))


def test_a_template_sees_the_row_and_no_python(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "#### 1"}\n')
    prompt = {"template": "{{ question.__class__.__mro__ }}"}
    with pytest.raises(BadData, match="unsafe"):
        BenchmarkRows.open(on("gsm8k", tmp_path / "rows.jsonl", prompt=prompt))


def test_each_part_of_a_benchmark_has_a_digest_that_changes_with_it_alone(tmp_path):
    benchmark = on("gsm8k", "rows.jsonl")
    grader = benchmark_grader(benchmark)
    base = benchmark_digests(benchmark, grader, "f")

    def changed(other, grader=grader, fingerprint="f"):
        now = benchmark_digests(other, grader, fingerprint)
        return {name for name in base if base[name] != now[name]}

    assert changed(on("gsm8k", "elsewhere/rows.jsonl")) == set()
    assert changed(on("gsm8k", "rows.jsonl@[0:10]")) == {"source"}
    assert changed(benchmark, fingerprint="g") == {"source"}
    assert changed(on("gsm8k", "rows.jsonl", prompt={"template": "{{ question }}"})) == {"prompt"}
    assert changed(on("gsm8k", "rows.jsonl", columns={"id": "question"})) == {"prompt"}
    assert changed(on("gsm8k", "rows.jsonl", sampling={"max_tokens": 7})) == {"sampling"}
    strict = on("gsm8k", "rows.jsonl", grader={"name": "gsm8k_strict"})
    assert changed(strict, benchmark_grader(strict)) == {"grader"}
