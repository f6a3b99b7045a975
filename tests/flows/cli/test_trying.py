"""`cairn try`: a recipe's own steps on a few prompts, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.commands import cairn
from tests.tiny_run import tiny_config

CODE = """
import cairn


async def generate(ctx, sample):
    first = await ctx.sample(sample.prompt_ids, max_new_tokens=3)
    world = cairn.Segment.given([5, 6, 7])
    last = await ctx.sample([*sample.prompt_ids, *first.ids, 5, 6, 7], max_new_tokens=2)
    return cairn.Trajectory([first, world, last])


def grade(response, label, metadata):
    if label == "0":
        raise ValueError("no grade for 0")
    return {"reward": 0.5, "length": len(response)}
"""


def recipe(assets: Path, folder: Path, **sections: dict[str, object]) -> Path:
    values = tiny_config(assets, **sections).model_dump(mode="json", exclude_unset=True)
    values["data"]["rollout_shuffle"] = False
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_prompts_are_answered_and_graded_and_nothing_is_trained_or_recorded(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    home = tmp_path / "home"
    home.mkdir()
    sections: dict[str, dict[str, object]] = {
        "reward": {"custom_rm_path": f"{tmp_path}/code.py:grade"},
        "rollout": {"custom_generate_function_path": f"{tmp_path}/code.py:generate"},
    }
    file = recipe(tiny_assets, tmp_path, **sections)
    command = [str(Path(sys.executable).with_name("cairn")), "try", str(file), "--samples", "3", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment, timeout=200)
    assert ran.returncode == 1, ran.stderr  # one sample failed
    failed, *others = json.loads(ran.stdout)
    assert failed["error"].startswith("ValueError: no grade for 0")
    assert (failed["status"], failed["reward"]) == ("failed", None)
    for number, sample in enumerate(others, 1):
        assert (sample["reward"], sample["label"], sample["error"]) == (0.5, str(number), None)
        assert json.loads(sample["components"])["length"] == len(sample["response"])
        assert sample["prompt_ids"]
        world = sample["loss_mask"].index(0)
        assert sample["response_ids"][world : world + 3] == [5, 6, 7]
        assert sum(sample["loss_mask"]) == len(sample["loss_mask"]) - 3 == len(sample["response_ids"]) - 3
    assert [path.name for path in home.iterdir()] == [".cairn"], "what the code printed, and nothing else"
    assert not list(tmp_path.glob("cairn-try-*"))


def test_a_run_that_samples_nothing_has_nothing_to_try(tiny_assets: Path, tmp_path: Path) -> None:
    file = recipe(tiny_assets, tmp_path)
    result = cairn("try", file, "--set", "algorithm={loss_type: sft_loss}", "--set", "reward={}")
    assert result.exit_code == 2
    assert "a run that learns from demonstrations samples nothing: `cairn validate` checks it" in result.stderr
