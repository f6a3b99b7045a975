"""What a generate function made is looked at once more before it is durable."""

from pathlib import Path

import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.generation.progress import failure_name
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

CODE = """
from cairn import Segment, Trajectory

AFTER = {1: [10**6], 2: [-4], 3: [5] * 5000}


async def generate(ctx, sample):
    said = [await ctx.sample(sample.prompt_ids)]
    after = AFTER.get(sample.group_id, [5]) if sample.index == 0 else []
    return Trajectory([*said, *([Segment.given(after)] if after else [])])
"""


def test_a_sample_whose_last_tokens_the_model_cannot_take_fails_and_is_never_trained_on(
    tiny_assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "after.py").write_text(CODE)
    rollout = {"custom_generate_function_path": f"{tmp_path / 'after.py'}:generate", "num_rollout": 1}
    with tiny_context(str(tmp_path / "store"), tiny_config(tiny_assets, rollout=rollout)) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commit = run.committed(0, Step.ROLLOUT, "00-000")
        rows = run.read(commit).to_pylist()
    errors = {row["group_id"]: row["error"] for row in rows}
    assert errors[0] is None
    assert next(row["response_ids"][-1] for row in rows if row["group_id"] == 0) == 5
    assert "returned token 1000000, outside the model's vocabulary of" in errors[1]
    assert "returned token -4, outside the model's vocabulary of" in errors[2]
    assert "tokens, more than the model's context of" in errors[3]
    assert {name: count for name, count in commit.metrics.items() if name.startswith("failed/")} == {
        "failed/refused": 3
    }


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("generate: EpisodeTimeout: it took longer than 2 s in all", "EpisodeTimeout"),
        ("generate: ValueError: bad: worse", "ValueError"),
        ("GenerationFailed: the process ended", "GenerationFailed"),
        ("its prompt of 300 tokens leaves no room: drop it", "refused"),
    ],
)
def test_failures_are_counted_by_the_name_of_the_error(error: str, name: str) -> None:
    assert failure_name(error) == name
