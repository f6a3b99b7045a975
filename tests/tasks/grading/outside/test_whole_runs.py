"""Runs whose rewards come from outside: every step of them, and again where one was killed before its rewards were
committed."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import CodeConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.processes.sandbox import Sandbox
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.upkeep.verification import verify
from cairn.tasks.grading.outside.code import confined
from tests.tasks.grading.outside.service import Service, chat_completion, serving
from tests.tiny_run import PROMPTS, DirectSteps, killed_driver, tiny_config, tiny_context, train_digests

ITERATIONS = 2

PROGRAM = '''
"""A program around one token of the policy's, which is right or not by that token."""

from cairn import Segment, Trajectory


async def generate(ctx, sample):
    said = [Segment.given(ctx.tokenizer.encode(text)) for text in ("print(ord('", "'[0]) % 2)")]
    one = await ctx.sample([*sample.prompt_ids, *said[0].ids], max_new_tokens=1)
    return Trajectory([said[0], one, said[1]])
'''


def worth(response: str) -> int:
    return sum(map(ord, response)) % 7


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """A judge's, or a reward service's, as it is asked."""
    if "messages" in body:
        assert body["model"] == "wise"
        return chat_completion(
            f"I see. [[{worth(body['messages'][-1]['content'])}]]", prompt_tokens=9, completion_tokens=4
        )
    return {"reward": worth(body["response"]), "label": body["label"]}


@contextmanager
def configured(
    kind: str, assets: Path, folder: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[RunConfig, Service]]:
    """A run of this kind of reward, and the service that it asks."""
    benchmark = {"name": "heldout", "path": str(assets / "heldout.jsonl"), "max_response_len": 4}
    rollout: dict[str, Any] = {"num_rollout": ITERATIONS, "rollout_batch_size": 2, "n_samples_per_prompt": 4}
    sections: dict[str, Any] = {"eval": {"eval_interval": 2, "benchmarks": [benchmark]}}
    with serving(reply) as service:
        reward: dict[str, Any] = {"custom_rm_path": None, "rm_type": kind}
        match kind:
            case "judge":
                reward["judge"] = {"url": f"{service.url}/v1", "model": "wise", "template": "{response}"}
            case "remote_rm":
                reward["rm_url"] = f"{service.url}/grade"
            case "code":
                bwrap = request.getfixturevalue("bwrap")
                try:
                    Sandbox(confined(CodeConfig(bwrap=bwrap)))
                except BadPlugin as error:
                    pytest.skip(str(error))
                reward["code"] = {"bwrap": bwrap, "num_workers": 2}
                tests = {"tests": json.dumps([{"input": "", "output": "0\n"}])}
                rows = [json.dumps({"prompt": prompt, "metadata": tests}) + "\n" for prompt in PROMPTS]
                (folder / "programs.jsonl").write_text("".join(rows))
                (folder / "program.py").write_text(PROGRAM)
                rollout["custom_generate_function_path"] = f"{folder / 'program.py'}:generate"
                sections = {"data": {"path": str(folder / "programs.jsonl"), "label_key": None}}
        rollout["rollout_max_response_len"] = 40 if kind == "code" else 6
        config = tiny_config(assets, rollout=rollout, reward=reward, **sections)
        yield config, service


def run_whole(store: str, config: RunConfig) -> tuple[list[str | None], list[dict[str, Any]]]:
    """All iterations; the digests of the weights, and the rows that the reward steps wrote."""
    with tiny_context(store, config) as (run, _):
        for index in range(ITERATIONS):
            iteration(run, DirectSteps(run), index)
        rows = [
            row
            for index in range(ITERATIONS)
            for row in run.read(run.committed(index, Step.REWARD, "00-000")).to_pylist()
        ]
        return train_digests(run, range(ITERATIONS)), rows


def questions(service: Service) -> list[str]:
    return [json.dumps(body, sort_keys=True) for body in service.requests]


def check(config: RunConfig, store: str, rows: Sequence[dict[str, Any]]) -> None:
    """Rewards of this kind that tell samples apart, in a ledger without a flaw."""
    assert {row["grader"] for row in rows} == {config.reward.rm_type}
    assert len({row["reward"] for row in rows}) > 1
    assert all(row["error"] is None and row["components"] for row in rows)
    assert [one.findings for one in verify(Ledger.open(open_store(store), "tiny")) if one.findings] == []


@pytest.mark.parametrize("kind", ["judge", pytest.param("remote_rm", marks=pytest.mark.slow)])
def test_every_step_of_a_run_is_made_and_no_question_is_asked_twice(
    kind: str, tiny_assets: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = str(tmp_path / "store")
    with configured(kind, tiny_assets, tmp_path, request) as (config, service):
        assert setup_problems(config) == []
        digests, rows = run_whole(store, config)
        requests = questions(service)
        assert len(requests) == len(set(requests))
        with tiny_context(store, config, "again") as (run, _):  # it samples the same
            iteration(run, DirectSteps(run), 0)
        assert questions(service) == requests
    assert len(set(digests)) == ITERATIONS
    check(config, store, rows)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("judge", marks=pytest.mark.proof),
        pytest.param("remote_rm", marks=pytest.mark.slow),
        pytest.param("code", marks=pytest.mark.slow),
    ],
)
def test_what_was_graded_before_a_kill_is_paid_for_once_and_the_weights_are_the_same(
    kind: str, tiny_assets: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = str(tmp_path / "killed")
    with configured(kind, tiny_assets, tmp_path, request) as (config, service):
        killed_driver(store, config, Step.REWARD)
        ledger = Ledger.open(open_store(store), "tiny")
        assert ledger.find(1, Step.ROLLOUT, "00-000") is not None
        assert ledger.find(1, Step.REWARD, "00-000") is None
        digests, rows = run_whole(store, config)
        requests = questions(service)
        assert len(requests) == len(set(requests))
        check(config, store, rows)
        assert run_whole(str(tmp_path / "undisturbed"), config) == (digests, rows)
