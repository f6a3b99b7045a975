"""The tutorial can be followed to its end, as it is written."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.examples.tutorial import follow

DIFFERS = 1
"""How `cairn diff` ends where two runs part."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_does_what_it_says(root: Path) -> None:
    said: dict[str, list[str]] = {}
    for command, done in follow(root):
        expected = DIFFERS if " diff " in command else 0
        assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
        said.setdefault(command.split()[1], []).append(done.stdout + done.stderr)
    assert "run partial: done; weight version 8" in said["train"][0]
    assert "reward" in said["show"][0]
    assert "warmer shares iterations 0 to 3 with partial" in said["fork"][0]
    assert "first differ at 000004/rollout" in said["diff"][0]
    assert len([line for line in said["sql"][0].splitlines() if line.startswith(("partial", "warmer"))]) == 8
    assert said["hardest.py"][0].count("Sort the digits") == 3
    assert "computed" in said["eval"][0]
    assert "not computed" in said["eval"][1]
    assert AutoModelForCausalLM.from_pretrained(root / "sorter").num_parameters() == 123_264
    assert "every byte is what was committed" in said["verify"][0]
