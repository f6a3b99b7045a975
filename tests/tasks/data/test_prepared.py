"""`rollout.num_data_workers`: prompts that are made ahead are those that would be made when they are drawn."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.models.tokenizers import load_tokenizer
from cairn.tasks.data.drawing import next_prompts
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.prompts import PromptData, PromptRow
from tests.tiny_run import tiny_config


@pytest.mark.parametrize("kind", ["file", "mixture"])
def test_any_number_of_workers_draws_the_same_prompts_and_makes_the_next_ones_ahead(
    kind: str, tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in (tiny_assets / "train.jsonl").read_text().splitlines()]
    rows[3]["prompt"], rows[7]["prompt"] = "1 " * 300, "\ud800"  # too long, and no text
    for name, some in (("all", rows), ("few", rows[:5]), ("many", rows[5:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    few, many = ({"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("few", "many"))
    data = {"file": {"path": str(tmp_path / "all.jsonl")}, "mixture": {"path": "", "mixture": [few, many]}}[kind]
    made_by: list[str] = []
    make = PromptData._row

    def recorded(self: PromptData, index: int) -> PromptRow:
        made_by.append(threading.current_thread().name)
        return make(self, index)

    monkeypatch.setattr(PromptData, "_row", recorded)

    def drawn(workers: int) -> list[Any]:
        config = tiny_config(tiny_assets, data=data, rollout={"num_data_workers": workers})
        opened: Any = open_data(config, load_tokenizer(config.model.path))
        cursor: Any = 0
        draws = []
        for _ in range(9):  # of 24 rows, 6 at a time: over the ends of epochs
            draw = next_prompts(config, opened, cursor, 6, (), max_prompt_len=200)
            cursor = draw.cursor
            draws.append((draw.rows, draw.cursor, draw.passed_over))
        return draws

    at_once = drawn(0)
    assert {name.partition("_")[0] for name in made_by} == {"MainThread"}
    made_by.clear()
    assert drawn(3) == at_once
    here = made_by.count("MainThread")
    assert 0 < here < 6 + 9 * 2  # the first draw, and what replaces skipped rows
    assert len(made_by) - here > 40
