"""A cache of graders' answers, keyed by the question, so that each answer is paid for once.

```
answers/<grader>/<sha256>.arrow
```
A folder belongs to one version of one grader. All runs, forks and evaluations of a store share it. Each file holds
answers, one row each with the digest of the question. The name of a file is the SHA-256 of its bytes.

| a reader finds | meaning |
|---|---|
| a question's digest | the grader is not called again |
| the same digest in several files | the first that was read counts: two callers had the same question |
| a file whose digest is wrong | torn: ignored |
| a listed file that is gone | its rows are in another file by now |

Answers are written while other answers are still pending, those of a tenth of a second in one file. When all answers of
one call have arrived, its files are merged into one. If there are more than `MERGE_THRESHOLD` files, all are merged.
The contents of a file are in another one before it is deleted. The folder does not belong to any run. Deleting it costs
as much as calling the grader again.

Each answer carries the digest of its prompt, by which redaction finds it (`forget`). An answer without this digest, as
in files of earlier versions, may belong to any prompt.
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
from cairn.storage.logs.paced import PacedWriter
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json
from cairn.storage.store.store import Store

MERGE_THRESHOLD = 64
"""Number of files of one grader above which they are merged when the grader's cache is opened."""
_MAX_LISTINGS = 10
"""Greatest number of listings of the folder while other processes merge files."""
_SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("reward", pa.float64()),
        ("components", pa.string()),
        ("error", pa.string()),
        ("prompt", pa.string()),
    ]
)
_OLD_SCHEMA = _SCHEMA.remove(_SCHEMA.get_field_index("prompt"))
"""Schema of the files of earlier versions."""


@dataclass(frozen=True)
class Answer:
    """Answer of a grader: a reward with its components, or the reason why there is none."""

    reward: float | None
    components: Mapping[str, Any] | None = None
    error: str | None = None
    prompt: str | None = None
    """`prompt_digest` of the sample's prompt; None if unknown."""


def prompt_digest(text: str) -> str | None:
    """Return the digest by which the answers about a prompt are found; None if the grader did not see the prompt."""
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def forget(store: Store, texts: Collection[str]) -> int:
    """Delete the answers about prompts, and all answers whose prompt is unknown. Return the number of deleted answers.

    `texts` are the prompts as the model read them. Answers about other prompts stay: a file is deleted only after its
    remaining answers are in a new file.
    """
    about, gone = {prompt_digest(text) for text in texts}, 0
    for folder in layout.answer_folders(store.list(layout.ANSWERS)):
        for name in store.list(folder):
            try:
                table = _table(name, store.read(f"{folder}/{name}"))
            except FileNotFoundError:
                continue
            if table is None:  # torn or foreign: no reader uses it
                continue
            rest = table.filter(pa.array([p is not None and p not in about for p in table["prompt"].to_pylist()]))
            if rest.num_rows == table.num_rows:
                continue
            if rest.num_rows:
                _write(store, folder, rest)
            store.delete(f"{folder}/{name}")
            gone += table.num_rows - rest.num_rows
    return gone


def _table(name: str, data: bytes) -> pa.Table | None:
    """Return the rows of a file; None if it is torn or holds no answers."""
    if hashlib.sha256(data).hexdigest() != layout.parse_answers(name):
        return None
    table = tables.from_ipc(data)
    if table.schema.equals(_OLD_SCHEMA):
        table = table.append_column(_SCHEMA.field("prompt"), pa.nulls(table.num_rows, pa.string()))
    return table if table.schema.equals(_SCHEMA) else None


def _write(store: Store, folder: str, table: pa.Table) -> str:
    sha256, data = tables.to_ipc(table)
    name = f"{sha256}.arrow"
    store.write(f"{folder}/{name}", data)
    return name


def question_digest(question: Any) -> str:
    """Return the digest of a question, which consists of JSON values. Equal values have equal digests."""
    return hashlib.sha256(json.dumps(question, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Answers:
    """Answers of one grader. Thread-safe."""

    def __init__(self, store: Store, grader: str, version: str) -> None:
        self._store = store
        self._folder = layout.answers(canonical.digest({"grader": grader, "version": version}))
        self._lock = threading.RLock()
        self._read: set[str] = set()
        self._known: dict[str, Answer] = {}

    def find(self, questions: Collection[str]) -> dict[str, Answer]:
        """Return the known answers to questions, by the digests of the questions. Raises StoreError."""
        with self._lock:
            self._refresh()
            return {question: self._known[question] for question in questions if question in self._known}

    def log(self) -> "AnswerLog":
        """Return a log that writes answers as they arrive."""
        return AnswerLog(self)

    def write(self, answers: Mapping[str, Answer]) -> str:
        """Make answers durable in one file. Return its name."""
        values = list(answers.values())
        table = pa.table(
            {
                "question": list(answers),
                "reward": [answer.reward for answer in values],
                "components": [None if a.components is None else json.dumps(dict(a.components)) for a in values],
                "error": [answer.error for answer in values],
                "prompt": [answer.prompt for answer in values],
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
        """Merge several files into one and delete them. `answers` are all their answers."""
        merged = self.write(answers)
        for name in set(names) - {merged}:
            self._store.delete(f"{self._folder}/{name}")

    def _refresh(self) -> None:
        opening = not self._read
        for _ in range(_MAX_LISTINGS):
            names = [name for name in self._store.list(self._folder) if layout.parse_answers(name)]
            fresh = [name for name in names if name not in self._read]
            found = self._store.read_many([f"{self._folder}/{name}" for name in fresh])
            for name, data in zip(fresh, found, strict=True):
                if data is not None:
                    self._read.add(name)
                    self._take(name, data)
            if None not in found:
                break
        if opening and len(self._read) > MERGE_THRESHOLD:
            self.join(set(self._read), dict(self._known))

    def _take(self, name: str, data: bytes) -> None:
        table = _table(name, data)
        for row in [] if table is None else table.to_pylist():
            try:
                components = None if row["components"] is None else from_json(row["components"])
            except ValueError:  # the grader is called again
                continue
            answer = Answer(row["reward"], components, row["error"], row["prompt"])
            self._known.setdefault(row["question"], answer)


class AnswerLog(PacedWriter):
    """Log of the answers of one call. Each is durable within a tenth of a second."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._names: list[str] = []
        self._all: dict[str, Answer] = {}
        super().__init__(self._write_answers, "a grader's answers")

    def close(self) -> None:
        """Wait until everything appended is durable, and merge it into one file. Raises StoreError."""
        super().close()
        if len(self._names) > 1:
            names, self._names = self._names, []
            self._answers.join(names, self._all)

    def _write_answers(self, answers: list[tuple[str, Answer]]) -> None:
        batch = dict(answers)
        self._names.append(self._answers.write(batch))
        self._all |= batch
