"""Conversion of a benchmark's row to what the model reads.

A rendered row is `{"prompt": …, "label": …, "metadata": …}`, as in training data. So all code that takes prompts takes
those of a benchmark. Its metadata has the row's `id` and the columns that the benchmark names.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from huggingface_hub import try_to_load_from_cache
from jinja2 import Template

from cairn.configs.digest import canonical_json
from cairn.configs.errors import BadData
from cairn.configs.schema.data import RowFormat
from cairn.configs.schema.evaluation import TEMPLATES, Benchmark
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.data.prompts import OverRows, PromptData
from cairn.tasks.data.rows import FILES, RowFile, label_text, open_rows, without_slice
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.rewards.grader import NamedGrader

# Location of a benchmark's rows on this machine.


def local_data(benchmark: Benchmark) -> str | None:
    """Return the path or URL of the rows: the benchmark's own `data`, otherwise the data set's file at its revision in
    Hugging Face's cache (`HF_HOME`); None where it is not there. Fetches nothing."""
    source = benchmark.source
    if source.data is not None or source.dataset is None or source.file is None:
        return source.data
    path = try_to_load_from_cache(source.dataset, source.file, revision=source.revision, repo_type="dataset")
    return path if isinstance(path, str) else None


def require_data(benchmark: Benchmark) -> str:
    """Return the path or URL of the rows. Raises BadData, with how to get them, where they are not on this machine."""
    path = local_data(benchmark)
    if path is None:
        raise BadData(how_to_get(benchmark))
    return path


def how_to_get(benchmark: Benchmark) -> str:
    """Return what to do where the rows are not on this machine."""
    source = benchmark.source
    if source.dataset is None:
        return f"the benchmark {benchmark.name} names no rows: give a file with --data"
    return (
        f"the rows of {benchmark.name} are not on this machine: give a file with --data, or fetch them once with `hf "
        f"download {source.dataset} {source.file} --repo-type dataset --revision {source.revision}`"
    )


# Digests of what a benchmark's result depends on: results with equal digests are comparable.


def benchmark_digests(benchmark: Benchmark, grader: NamedGrader, fingerprint: str) -> dict[str, str]:
    """Return the SHA-256, in hex, of each part of a benchmark.

    The parts are `prompt` (with its columns), `sampling`, `grader` (with the version of its code) and `source`: the
    slice of the rows, and their `fingerprint` wherever they are stored.
    """
    source = benchmark.source.data or ""
    slice = source[source.rfind("@[") :] if source.endswith("]") and "@[" in source else ""
    parts = {
        "prompt": [benchmark.prompt.model_dump(mode="json"), benchmark.columns.model_dump(mode="json")],
        "sampling": benchmark.sampling.model_dump(mode="json"),
        "grader": [benchmark.grader.model_dump(mode="json"), grader.version],
        "source": [fingerprint, slice],
    }
    return {name: hashlib.sha256(canonical_json(part)).hexdigest() for name, part in parts.items()}


def grader_config(benchmark: Benchmark) -> RewardConfig:
    """Return the configuration of the benchmark's grader pool."""
    name, timeout = benchmark.grader.name, benchmark.grader.timeout
    if "." in name:
        return RewardConfig(rm_timeout=timeout, custom_rm_path=name)
    return RewardConfig(rm_timeout=timeout, rm_type=name, rm_type_key=None)


def benchmark_grader(benchmark: Benchmark) -> NamedGrader:
    """Return the benchmark's grader. Raises BadPlugin if none has that name."""
    return get_grader(grader_config(benchmark))


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters of choices, in order."""


class BenchmarkRows(OverRows):
    """Rendered rows of a benchmark, read by index. Thread-safe."""

    def __init__(self, benchmark: Benchmark, rows: RowFile) -> None:
        super().__init__(rows)
        self._benchmark = benchmark

    @classmethod
    def open(cls, benchmark: Benchmark) -> "BenchmarkRows":
        """Open the rows, and render each once: see `require_data` and `open_rows`. Raises BadData."""
        path = require_data(benchmark)
        columns, source = benchmark.columns, "csv" if without_slice(path).endswith(".csv") else FILES
        required = dict.fromkeys(columns.choices, "columns.choices")
        required |= dict.fromkeys(columns.metadata, "columns.metadata")
        named = {"columns.id": columns.id, "columns.label": columns.label, "prompt.column": benchmark.prompt.column}
        required |= {name: option for option, name in named.items() if name is not None}
        rows = open_rows(source, path, required, _Everything(), lambda row, where: rendered(benchmark, row, 0, where))
        return cls(benchmark, rows)

    def read(self, index: int) -> dict[str, Any]:
        """Return the rendered row at `index`, from 0."""
        return rendered(self._benchmark, self._rows.read(index), index, f"{self.path}, row {index + 1}")


def open_prompts(benchmark: Benchmark, tokenizer: Any) -> PromptData:
    """Return the benchmark's prompts for a Hugging Face tokenizer. Raises BadData where there are no rows, one does not
    fit the benchmark, or the prompts need a chat template and the tokenizer has none."""
    chat = benchmark.prompt.style == "chat"
    if chat and not tokenizer.chat_template:
        raise BadData(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template, but {benchmark.name} has "
            "chat prompts: use a benchmark with plain prompts, or a model whose tokenizer has one"
        )
    return PromptData(BenchmarkRows.open(benchmark), RowFormat(apply_chat_template=chat), tokenizer)


def rendered(benchmark: Benchmark, row: Mapping[str, Any], index: int, where: str) -> dict[str, Any]:
    """Return the rendered row. Raises BadData, which names the row by `where`, if it does not fit."""
    columns = benchmark.columns
    id = str(index) if columns.id is None else str(row[columns.id])
    label = None if columns.label is None else row[columns.label]
    names = dict(row)
    if columns.choices:
        texts = [(label_text(row[name], name, where) or "").strip() for name in columns.choices]
        order = choice_order(id if columns.id is not None else json.dumps(texts), len(texts))
        names["choices"], label = [texts[i] for i in order], LETTERS[order.index(0)]
    if columns.label is not None:
        label = label_text(label, columns.label, where)
    if columns.label_pattern is not None:
        label = _cut(label or "", columns.label_pattern, where)
    metadata = {name: row[name] for name in columns.metadata}
    return {
        "prompt": _prompt(benchmark, names, where),
        "label": label,
        "metadata": {"id": id, **metadata, **({"choices": names["choices"]} if columns.choices else {})},
    }


def choice_order(key: str, count: int) -> list[int]:
    """Return a permutation of `count` choices that depends on `key` alone: by SHA-256, on every machine and version."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}\n{i}".encode()).digest())


def graded_part(benchmark: Benchmark, response: str) -> str:
    """Return the part of a response that is graded: all text up to the first of `prompt.until`."""
    ends = [end for stop in benchmark.prompt.until if (end := response.find(stop)) >= 0]
    return response[: min(ends, default=None)]


def _cut(label: str, pattern: str, where: str) -> str:
    match = re.search(pattern, label)
    if match is None:
        raise BadData(f"{where}: the label has no match for columns.label_pattern {pattern!r}: correct one of them")
    return match[1].strip()


def _prompt(benchmark: Benchmark, names: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    prompt = benchmark.prompt
    question = names[prompt.column] if prompt.column is not None else _filled(str(prompt.template), names, where)
    if prompt.style == "plain":
        if not isinstance(question, str):
            raise BadData(f"{where}: {prompt.column!r} is not a string, but the benchmark's prompts are plain")
        shown = [f"{example.question}{prompt.delimiter}{example.answer}" for example in prompt.examples]
        return prompt.separator.join([*shown, question])
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    turns = [
        {"role": role, "content": text}
        for example in prompt.examples
        for role, text in (("user", example.question), ("assistant", example.answer))
    ]
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return [*system, *turns, *messages]


def _filled(template: str, names: Mapping[str, Any], where: str) -> str:
    try:
        return _compiled(template).render({**names, "row": names})
    except Exception as error:  # a template raises what it likes
        raise BadData(
            f"{where} does not fit the benchmark's prompt ({error}); it has {', '.join(map(str, names))}"
        ) from None


@cache
def _compiled(template: str) -> Template:
    return TEMPLATES.from_string(template)


class _Everything(frozenset[str]):
    """Set of all strings: a template may name any column."""

    def __contains__(self, name: object) -> bool:
        return True
