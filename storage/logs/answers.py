"""What graders answered, kept by what they were asked: an answer is paid for once.

```
answers/<grader>/<sha256>.arrow
```
A folder is of one grader at one version; runs, forks and evaluations of a store share it. Each file holds answers, a
row each under the digest of its question, and is named by the SHA-256 of its bytes.

| found | meaning |
|---|---|
| a question's digest | it is not asked again |
| the same in several files | the first that was read counts: one was asked for by two at the same time |
| a file whose digest is wrong | torn: ignored |
| a file that is listed and gone | its rows are in another by now |

Answers are written while others are still waited for, all of a tenth of a second in one file; when all have come, the
files of one call become one, and where there are more than `MANY`, all do. What a file held is in another before it
goes. The folder is no part of any run: removing it costs what asking again costs.

Each answer carries the digest of the prompt that it is about, by which redaction finds it (`forget`). One without, as
in files of earlier versions, may be about any.
"""

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger import snapshots as tables
from cairn.storage.logs.parts import PacedWriter
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.store import Store

MANY = 64
"""Files of one grader that are read by themselves when it is opened."""
_LOOKS = 10
"""Times that the folder is listed while others put files together."""
_SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("reward", pa.float64()),
        ("components", pa.string()),
        ("error", pa.string()),
        ("prompt", pa.string()),
    ]
)
_BEFORE = _SCHEMA.remove(_SCHEMA.get_field_index("prompt"))
"""Schema of the files that earlier versions wrote."""


@dataclass(frozen=True)
class Answer:
    """A grader's: a reward with what is recorded beside it, or why there is none."""

    reward: float | None
    components: Mapping[str, Any] | None = None
    error: str | None = None
    prompt: str | None = None
    """`prompt_digest` of what the sample answers; None where that is not known."""


def prompt_digest(text: str) -> str | None:
    """By which the answers about a prompt are found; None of one that the grader did not see."""
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def forget(store: Store, texts: Collection[str]) -> int:
    """Remove the answers about prompts, by their texts as the model read them, and those of which nobody knows what
    they are about; how many. What graders answered about others stays. A file goes when the one without them is there.
    """
    about, gone = {prompt_digest(text) for text in texts}, 0
    for folder in layout.answer_folders(store.list(layout.ANSWERS)):
        for name in store.list(folder):
            try:
                table = _table(name, store.read(f"{folder}/{name}"))
            except FileNotFoundError:
                continue
            if table is None:  # torn, or another's: no reader takes it
                continue
            kept = table.filter(pa.array([p is not None and p not in about for p in table["prompt"].to_pylist()]))
            if kept.num_rows == table.num_rows:
                continue
            if kept.num_rows:
                _write(store, folder, kept)
            store.delete(f"{folder}/{name}")
            gone += table.num_rows - kept.num_rows
    return gone


def _table(name: str, data: bytes) -> pa.Table | None:
    """What a file holds; None if it is torn, or none of answers."""
    if hashlib.sha256(data).hexdigest() != layout.parse_answers(name):
        return None
    table = tables.from_ipc(data)
    if table.schema.equals(_BEFORE):
        table = table.append_column(_SCHEMA.field("prompt"), pa.nulls(table.num_rows, pa.string()))
    return table if table.schema.equals(_SCHEMA) else None


def _write(store: Store, folder: str, table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    name = f"{hashlib.sha256(data).hexdigest()}.arrow"
    store.write(f"{folder}/{name}", data)
    return name


def question_digest(question: Any) -> str:
    """Of JSON values: equal values, equal digest."""
    return hashlib.sha256(json.dumps(question, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Answers:
    """The answers of one grader. Thread-safe."""

    def __init__(self, store: Store, grader: str, version: str) -> None:
        self._store = store
        self._folder = layout.answers(canonical.digest({"grader": grader, "version": version}))
        self._lock = threading.RLock()
        self._read: set[str] = set()
        self._known: dict[str, Answer] = {}

    def find(self, questions: Collection[str]) -> dict[str, Answer]:
        """Those of the questions, by their digests, that were answered. Raises StoreError."""
        with self._lock:
            self._look()
            return {question: self._known[question] for question in questions if question in self._known}

    def log(self) -> "AnswerLog":
        """To write answers as they come."""
        return AnswerLog(self)

    def write(self, answers: Mapping[str, Answer]) -> str:
        """Make answers durable, in one file. Returns its name."""
        given = list(answers.values())
        table = pa.table(
            {
                "question": list(answers),
                "reward": [answer.reward for answer in given],
                "components": [None if a.components is None else json.dumps(dict(a.components)) for a in given],
                "error": [answer.error for answer in given],
                "prompt": [answer.prompt for answer in given],
            },
            _SCHEMA,
        )
        name = _write(self._store, self._folder, table)
        with self._lock:
            self._read.add(name)
            for question, answer in answers.items():
                self._known.setdefault(question, answer)
        return name

    def join(self, names: Collection[str], answers: Mapping[str, Answer]) -> None:
        """Put what several files hold into one, and remove them."""
        kept = self.write(answers)
        for name in set(names) - {kept}:
            self._store.delete(f"{self._folder}/{name}")

    def _look(self) -> None:
        opening = not self._read
        for _ in range(_LOOKS):
            names = [name for name in self._store.list(self._folder) if layout.parse_answers(name)]
            fresh = [name for name in names if name not in self._read]
            found = self._store.read_many([f"{self._folder}/{name}" for name in fresh])
            for name, data in zip(fresh, found, strict=True):
                if data is not None:
                    self._read.add(name)
                    self._take(name, data)
            if None not in found:
                break
        if opening and len(self._read) > MANY:
            self.join(set(self._read), dict(self._known))

    def _take(self, name: str, data: bytes) -> None:
        table = _table(name, data)
        for row in [] if table is None else table.to_pylist():
            try:
                components = None if row["components"] is None else from_json(row["components"])
            except ValueError:  # it is asked for again
                continue
            answer = Answer(row["reward"], components, row["error"], row["prompt"])
            self._known.setdefault(row["question"], answer)


class AnswerLog(PacedWriter):
    """Answers of one call, durable within a tenth of a second. See `PacedWriter`."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._names: list[str] = []
        self._all: dict[str, Answer] = {}
        super().__init__(self._write_answers, "a grader's answers")

    def close(self) -> None:
        """Return when everything appended is durable, in one file. Raises StoreError."""
        super().close()
        if len(self._names) > 1:
            names, self._names = self._names, []
            self._answers.join(names, self._all)

    def _write_answers(self, number: int, answers: list[tuple[str, Answer]]) -> None:
        given = dict(answers)
        self._names.append(self._answers.write(given))
        self._all |= given
