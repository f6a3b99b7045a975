"""An environment of verifiers, played as published: its harness, its processes, its rewards."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.models.tokenizers import read_tokenizer
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import SamplingParams
from tests.engines.agents.environments.by_heart import write_model
from tests.engines.rollout.models import rollout_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
BEGIN = "<|im_start|>user\nGuess my number from 0 to 9.<|im_end|>\n<|im_start|>assistant\n"
HIGHER = BEGIN + "5<|im_end|>\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
LOWER = BEGIN + "5<|im_end|>\n<|im_start|>user\nLower.<|im_end|>\n<|im_start|>assistant\n"
REPLIES = [(BEGIN, "5"), (HIGHER, "7"), (LOWER, "nothing")]

UNJUST = """
import cairn
import verifiers.v1 as vf

__all__ = ["Unjust"]


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def unjust(self, trace: vf.Trace) -> float:
        raise RuntimeError("no judge today")


class Unjust(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(idx=0, prompt="Guess my number from 0 to 9."), self.config.task)


async def generate(ctx, sample):
    return await cairn.verifiers(ctx, sample, {"taskset": {"id": "unjust"}})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, REPLIES)
    return folder


def played(model: Path, indices: Sequence[int], name: str = "examples.verifiers.play") -> list[GeneratedSample]:
    """Episodes of tasks, in the process of user code."""
    engine = TransformersEngine(str(model), rollout_config())
    function = GenerateFunction(f"{name}.generate", (str(ROOT), *sys.path), tokenizer=str(model), timeout=120.0)
    samples = SampleEngine(engine.open, engine.abort)
    requested = [SampleRequest(0, number, [20, 21], number, metadata={"index": i}) for number, i in enumerate(indices)]
    result = []
    for reported in samples.generate(requested, SamplingParams(max_new_tokens=8, temperature=0.0), function):
        if isinstance(reported, list):
            result += reported
        elif reported.awaited:
            samples.acknowledge(reported.number)
    return sorted(result, key=lambda sample: sample.key)


def numbers(count: int) -> list[int]:
    from higher_or_lower import HigherOrLowerConfig, HigherOrLowerTaskset

    tasks = iter(HigherOrLowerTaskset(HigherOrLowerConfig(id="higher_or_lower")))
    return [next(tasks).data.number for _ in range(count)]


def test_episodes_are_token_exact_and_have_the_environments_reward(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "verifiers")
    known = numbers(200)
    result = played(model, [*(known.index(number) for number in (5, 7, 2)), 5000])
    tokenizer = read_tokenizer(model)
    assert [sample.error for sample in result] == [
        *[None] * 3,
        "generate: EpisodeFailed: higher_or_lower has 1000 tasks, but none with index 5000 (play.py:15)",
    ]
    (first,), (longer,), (lost,) = (sample.trajectories for sample in result[:3])
    assert [one.reward for one in (first, longer, lost)] == [1.0, 0.5, 0.0]
    assert tokenizer.decode(first.prompt_ids) == BEGIN
    assert [len(one.segments) for one in (first, longer, lost)] == [1, 3, 5]
    assert tokenizer.decode([*longer.prompt_ids, *longer.response_ids]) == f"{HIGHER}7<|im_end|>"
    assert [segment.call is not None for segment in longer.segments] == [True, False, True]
    assert longer.loss_mask.tolist() == [1, 1] + [0] * len(longer.segments[1].ids) + [1, 1]


def test_a_reward_that_raises_fails_the_sample_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unjust.py").write_text(UNJUST)
    monkeypatch.syspath_prepend(tmp_path)
    (failed,) = played(model, [0], "unjust")
    assert failed.error is not None
    assert failed.error.startswith("generate: EpisodeFailed: unjust: ")
    assert "no judge today" in failed.error
