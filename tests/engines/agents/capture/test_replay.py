"""A captured agent that was cut off runs again only where it may, and is then given the replies that are recorded."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import CallRecord, GeneratedSample, Recorded, SampleRequest
from cairn.engines.types.types import SamplingParams

pytestmark = pytest.mark.proof

CODE = '''
import asyncio
import os
import sys

import cairn
from cairn.engines.agents.capture import session

session.PATIENCE = 0.2
AGENT = """
import json
import os
import sys
from urllib.request import Request, urlopen

KEY = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


def reply_to(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, KEY)) as response:
        return json.load(response)["choices"][0]["message"]


hello = {"role": "user", "content": sys.argv[1]}
reply_to([hello, reply_to([hello]), {"role": "user", "content": "Bye."}])
"""


async def generate(ctx, sample):
    how = dict(sample.metadata)
    question = how.pop("question")
    async with cairn.capture(ctx, sample, **how) as session:
        environment = {**os.environ, **session.environment}
        agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, question, env=environment)
        assert await agent.wait() == 0
    return session.trajectories()
'''
ONCE: dict[str, Any] = {"question": "Hello."}
AGAIN = {**ONCE, "replayable": True}
OTHERWISE = {"question": "Think.", "replayable": True}


@pytest.fixture(scope="module")
def generated(engine: TransformersEngine, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the agent for a sample of which something is recorded. Gives what is recorded then, too."""
    file = tmp_path_factory.mktemp("code") / "agents.py"
    file.write_text(CODE)
    samples = SampleEngine(engine.open, engine.abort)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    search = (str(Path(__file__).parents[4]), *sys.path)
    function = GenerateFunction(f"{file}:generate", search, str(talker), timeout=60.0)

    def generated(how: dict[str, Any], recorded: list[CallRecord]) -> tuple[GeneratedSample, list[CallRecord]]:
        requested = SampleRequest(0, 0, [20, 21, 22], 7, metadata=how, recorded=tuple(recorded))
        ended, records = list[GeneratedSample](), list[CallRecord]()
        with closing(samples.generate([requested], params, function)) as stream:  # type: ignore[type-var]
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
    whole, records = generated(AGAIN, [])
    assert len(records) == 2
    replayed, new = generated(AGAIN, records)
    assert ids_of(replayed) == ids_of(whole)
    assert new == []
    went_on, new = generated(AGAIN, records[:1])
    assert ids_of(went_on) == ids_of(whole)
    assert [record.call for record in new] == [records[1].call]

    reported = "its process was lost during or after a captured session"
    assert reported in generated(ONCE, records[:1])[0].error
    assert ids_of(generated(ONCE, [])[0]) == ids_of(whole)

    sample, _ = generated(OTHERWISE, records)
    assert "EpisodeDiverged: the agent requests call" in sample.error
