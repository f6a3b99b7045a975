"""Environments of `verifiers` 0.4, as published: `pip install 'cairn-rl[verifiers]'`.

    async def generate(ctx, sample):
        return await cairn.verifiers(ctx, sample, {"taskset": {"id": "my_taskset"}}, index=sample.metadata["index"])

Its taskset has the task, its harness plays it, its rewards judge it. What it asks of its model is asked of
`ctx.sample`, by the endpoint of tokens that `cairn.capture` serves: `verifiers` makes the tokens of a prompt itself,
so that a turn's prompt begins with the exact tokens of the turn before. The trajectory is made of those, and begins
after the prompt that the environment gave, whatever the row has.

| an episode of it | becomes |
|---|---|
| ends | the trajectory, with the sum of the task's weighted rewards |
| ends with an error, its own or its harness's | an error: the sample fails, and is not trained on as one of reward 0 |
| is cut off with its process | is played again, and given the replies that are recorded |

Its runtime is a process of this machine unless the configuration says otherwise, and its harness `null`, which talks
and calls the task's tools. No uv is needed, nor is anything downloaded, for programs whose packages are installed.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from cairn.engines.agents.capture.server import capture
from cairn.engines.agents.environments import uv
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory

_NO_KEY = "CAIRN_NO_KEY"
"""Variable that holds no key: the session is in the URL."""
_RUNTIME = {"type": "subprocess"}
_HARNESS = "null"
_THEIR_HARNESS = "bash"
"""What they take where neither the taskset nor the configuration says."""


class EpisodeFailed(Exception):
    """The environment has no reward for what was done in it."""


async def verifiers(
    ctx: Context,
    sample: SampleRequest,
    env: Mapping[str, Any],
    *,
    index: int = 0,
    renderer: Mapping[str, Any] | None = None,
    replayable: bool = True,
) -> list[Trajectory]:
    """Play an episode. Raises what `cairn.capture` raises, and EpisodeFailed where the environment says so.

    Args:
        env: the environment's configuration, as verifiers' own `[env]` block has it.
        index: of the task in the taskset, from 0.
        renderer: what makes tokens of messages, as verifiers has it; by default the model's chat template, which cannot
            read tool calls: name that of the model's family for these, as `{"name": "qwen3"}`.
        replayable: what the environment does besides asking the policy may be done again.
    """
    # Importing it takes seconds, and others are at work meanwhile.
    environments, task = await asyncio.to_thread(_environment_and_task, json.dumps(dict(env), sort_keys=True), index)
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.env import RunSlot

    async with capture(ctx, sample, replayable=replayable) as session:
        client = vf.TrainClientConfig(
            base_url=session.base_url,
            api_key_var=_NO_KEY,
            renderer_model_name=ctx.tokenizer.name_or_path,
            renderer=dict(renderer or {"name": "default"}),
        )
        sampling = vf.SamplingConfig(temperature=ctx.sampling.temperature, max_tokens=ctx.max_new_tokens)
        environment = vf.load_environment(environments.config)
        async with environment.serving():
            episode = await environment.run_slot(RunSlot(task), ModelContext("policy", client, sampling))
        found = session.trajectories() if session.exchanges else []
    return _rewarded(episode, found)


def _environment_and_task(given: str, index: int) -> tuple["_Environments", Any]:
    with _reading:
        environments = _environments(given)
        return environments, environments.task(index)


_reading = threading.Lock()


class _Environments:
    """Of one configuration."""

    def __init__(self, given: dict[str, Any]) -> None:
        try:
            from verifiers.v1.utils.loaders import env_config_type, load_taskset, resolve_env_config
        except ModuleNotFoundError as error:
            told = f"cairn.verifiers needs the module {error.name!r}: pip install 'cairn-rl[verifiers]'"
            raise EpisodeFailed(told) from None
        uv.put_on_path()
        kind = env_config_type(given.get("taskset", {}).get("id", ""), given.get("id", ""))
        self.config = resolve_env_config({**given, **self._seats(kind, given)})
        self._tasks = iter(load_taskset(self.config.taskset))
        self._read: list[Any] = []

    def _seats(self, kind: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Its agents, with what the configuration leaves open."""
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import default_harness_id

        own = default_harness_id(given.get("taskset", {}).get("id", "")) != _THEIR_HARNESS
        harness = {} if own else {"harness": {"id": _HARNESS}}
        names = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
        return {name: {"runtime": _RUNTIME, **harness, **given.get(name, {})} for name in names}

    def task(self, index: int) -> Any:
        """Of the taskset. Raises EpisodeFailed."""
        self._read.extend(itertools.islice(self._tasks, max(0, index + 1 - len(self._read))))
        if not 0 <= index < len(self._read):
            raise EpisodeFailed(f"{self.config.env_id} has {len(self._read)} tasks, and none of index {index}")
        return self._read[index]


@cache
def _environments(given: str) -> _Environments:
    return _Environments(json.loads(given))


def _rewarded(episode: Any, found: list[Trajectory]) -> list[Trajectory]:
    """The trajectories of an episode, with its reward. Raises EpisodeFailed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not end"
        raise EpisodeFailed(f"{episode.env.id}: {told}")
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if len(trained) != 1:
        raise EpisodeFailed(
            f"{episode.env.id} has {len(trained)} agents that are trained: let all but one of them have `trainable` off"
        )
    if not found:
        raise EpisodeFailed(f"{episode.env.id} asked its model nothing")
    return [replace(trajectory, reward=trained[0].reward) for trajectory in found]
