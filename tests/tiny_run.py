"""A tiny run of the real thing: a random model, a few prompts, a custom reward that a random policy can earn."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.flows.driver.sources import environment, input_digests, open_graders
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.steps import rules
from examples.quickstart.model import build_model, build_tokenizer
from tests.forks import FORKS
from tests.local_fleet import LocalFleet

PROMPTS = [f"Sort the digits {a} {b} {(a * b) % 10} in increasing order." for a in range(6) for b in range(4)]

GRADER = '''
"""Rewards low digits: a random policy earns different rewards within a group."""


def grade(response, label, metadata):
    return sum(ord(char) % 3 for char in response) / (3 * len(response) + 1)
'''


def write_assets(folder: Path) -> Path:
    """Write model, data and grader of the tiny run."""
    tokenizer = build_tokenizer(PROMPTS)
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": prompt, "label": str(index)}) + "\n" for index, prompt in enumerate(PROMPTS)]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "heldout.jsonl").write_text("".join(rows[:4]))
    (folder / "grader.py").write_text(GRADER)
    return folder


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_assets(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # runs that are resumed may use its grader
        yield folder


def tiny_config(assets: Path, context: dict[str, bool] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """Three iterations of 4 prompts × 4 samples on one engine; sections override. `context`: of the validation."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(assets / "model")},
        "data": {"path": str(assets / "train.jsonl")},
        "rollout": {
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
        },
        "reward": {"custom_rm_path": f"{assets / 'grader.py'}:grade"},
        "algorithm": {"use_rollout_logprobs": True},
        "training": {"lr": 1e-3, "num_threads": 1},
        "tracking": {"tensorboard_dir": None},
    }
    values = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    return RunConfig.model_validate(values, context=context)


class DirectSteps:
    """Calls steps one after the other, without Prefect."""

    def __init__(self, run: RunContext) -> None:
        self._run = run

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        return step(self._run, index, shard, *map(_result, args), **kwargs)

    def submit(
        self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any
    ) -> "Future[Commit]":
        future: Future[Commit] = Future()
        future.set_result(self.call(step, index, shard, *args, **kwargs))
        return future


def _result(argument: Any) -> Any:
    return argument.result() if isinstance(argument, Future) else argument


class Events(list[StepStarted | StepCommitted | Message]):
    """Events that a driver emitted."""

    def executed(self) -> list[str]:
        """Return the names of the steps that ran."""
        return [event.commit.name for event in self if isinstance(event, StepCommitted) and not event.adopted]

    def adopted(self) -> list[str]:
        """Return the names of the steps whose commits existed."""
        return [event.commit.name for event in self if isinstance(event, StepCommitted) and event.adopted]


@contextmanager
def tiny_context(
    store_url: str, config: RunConfig, name: str = "tiny", fleet: LocalFleet | None = None
) -> Iterator[tuple[RunContext, Events]]:
    """A live run with the engines in this process."""
    tokenizer = load_tokenizer(config.model.path)
    data = open_data(config, tokenizer)
    benchmarks = {b.name: PromptData.open(b, b.path, tokenizer) for b in config.eval.benchmarks}
    digests = input_digests(config, data, benchmarks)
    ledger = Ledger.create(open_store(store_url), name, config, inputs=digests, rules=rules(config))
    engines: Any = fleet or LocalFleet(config)
    events = Events()
    with ExitStack() as stack:
        if fleet is None:
            stack.callback(engines.close)
        lease = ledger.acquire(takeover=True)
        stack.callback(lease.release, Outcome.STOPPED)
        yield (
            RunContext(
                config,
                ledger,
                fleet=lambda: engines,
                tokenizer=tokenizer,
                data=data,
                max_prompt_len=200,
                benchmarks=benchmarks,
                graders=open_graders(config, stack, ledger.store, lambda: engines.scorer),
                environment=environment(),
                emit=events.append,
            ),
            events,
        )


def killed_driver(store_url: str, config: RunConfig, step: Step) -> None:
    """Have a driver, in a process of its own, end by SIGKILL in iteration 1: right before `step` commits its work."""
    driver = FORKS.Process(target=_be_killed, args=(store_url, config, step))
    driver.start()
    driver.join(300)
    assert driver.exitcode == -signal.SIGKILL


def _be_killed(store_url: str, config: RunConfig, step: Step) -> None:
    with tiny_context(store_url, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commit = run.commit

        def dying(**fields: Any) -> Any:
            if fields["step"] is step:
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(**fields)

        run.commit = dying  # type: ignore[method-assign]
        iteration(run, DirectSteps(run), 1)


def train_digests(run: RunContext, iterations: Sequence[int]) -> list[str | None]:
    """Return the state digests of the train steps."""
    return [run.committed(index, Step.TRAIN).state_digest for index in iterations]
