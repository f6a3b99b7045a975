"""A captured agent that was cut off runs again only where it may, and is then given the replies that are recorded."""

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.episodes.records import CallRecord, Recorded
from cairn.engines.episodes.samples import SampleEngine
from cairn.engines.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import SamplingParams

CODE = '''
import asyncio
import os
import subprocess
import sys

import cairn
from cairn.engines.capture import session

session.PATIENCE = 0.2
AGENT = """
import sys
from openai import OpenAI
client = OpenAI(max_retries=0)
for question in sys.argv[1:]:
    messages = [{"role": "user", "content": question}]
    reply = client.chat.completions.create(model="m", messages=messages).choices[0].message
    messages += [reply, {"role": "user", "content": "Bye."}]
    client.chat.completions.create(model="m", messages=messages)
"""


async def runs(ctx, sample, questions, **how):
    async with cairn.capture(ctx, sample, **how) as session:
        environment = {**os.environ, **session.environment}
        agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, *questions, env=environment)
        assert await agent.wait() == 0
    return session.trajectories()


async def once(ctx, sample):
    return await runs(ctx, sample, ["Hello."])


async def again(ctx, sample):
    return await runs(ctx, sample, ["Hello."], replayable=True)


async def otherwise(ctx, sample):
    return await runs(ctx, sample, ["Think."], replayable=True)
'''


@pytest.fixture(scope="module")
def generated(engine: TransformersEngine, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs one of the functions for a sample of which something is recorded. Gives what is recorded then, too."""
    file = tmp_path_factory.mktemp("code") / "agents.py"
    file.write_text(CODE)
    samples = SampleEngine(engine.open, engine.abort)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)

    def generated(name: str, recorded: list[CallRecord]) -> tuple[GeneratedSample, list[CallRecord]]:
        search = (str(Path(__file__).parents[3]), *sys.path)
        function = GenerateFunction(f"{file}:{name}", search, str(talker), timeout=60.0)
        asked = replace(SampleRequest(0, 0, [20, 21, 22], 7), recorded=tuple(recorded))
        ended, records = list[GeneratedSample](), list[CallRecord]()
        with closing(samples.generate([asked], params, function)) as stream:  # type: ignore[type-var]
            for part in stream:
                if isinstance(part, Recorded):
                    records += part.records
                else:
                    ended += part
        (sample,) = ended
        return sample, records

    return generated


def ids_of(sample: GeneratedSample) -> list[list[int]]:
    assert sample.error is None
    return [one.response_ids.tolist() for one in sample.trajectories]


def test_it_runs_again_where_it_may_and_is_given_its_replies(generated: Any) -> None:
    whole, records = generated("again", [])
    assert len(records) == 2
    assert ids_of(generated("again", records)[0]) == ids_of(whole)
    assert generated("again", records)[1] == []
    went_on, new = generated("again", records[:1])
    assert ids_of(went_on) == ids_of(whole)
    assert [record.call for record in new] == [records[1].call]

    told = "its process was lost in a captured session or after it"
    assert told in generated("once", records[:1])[0].error
    assert ids_of(generated("once", [])[0]) == ids_of(whole)

    sample, _ = generated("otherwise", records)
    assert "EpisodeDiverged: the agent asks for call" in sample.error
