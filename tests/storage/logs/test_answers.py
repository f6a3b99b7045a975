"""Kept answers of graders, whatever lies beside them."""

from pathlib import Path
from typing import Any

from cairn.storage.logs.answers import Answer, Answers
from cairn.storage.opening import open_store


def test_an_answer_that_no_reader_takes_is_asked_for_again_and_costs_no_other(tmp_path: Path) -> None:
    deep: Any = 1.0
    for _ in range(300):
        deep = [deep]
    store = open_store(str(tmp_path))
    Answers(store, "judge", "1").write({"a" * 64: Answer(1.0, {"said": deep}), "b" * 64: Answer(0.5, {"said": "b"})})
    found = Answers(store, "judge", "1").find(["a" * 64, "b" * 64])
    assert found == {"b" * 64: Answer(0.5, {"said": "b"})}
