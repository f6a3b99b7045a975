"""Environments of `verifiers` 0.4, as published: `pip install 'cairn-rl[verifiers]'`.

    async def generate(ctx, sample):
        return await cairn.verifiers(ctx, sample, {"taskset": {"id": "my_taskset"}}, index=sample.metadata["index"])

Its taskset provides the task, its harness runs the episode, and its rewards grade it. Requests to the model go to
`ctx.sample`, through the token endpoint of `cairn.capture`. `verifiers` tokenizes prompts itself, so that the prompt of
a turn begins with the exact tokens of the turn before. The trajectory consists of these tokens, and begins after the
environment's prompt, whatever prompt the data row has.

| its episode | result |
|---|---|
| ends | the trajectory, with the sum of the task's weighted rewards |
| ends with an error, its own or its harness's | an error: the sample fails, and is not trained on as one of reward 0 |
| is interrupted with its process | it runs again, and receives the recorded replies |

Unless the configuration differs, its runtime is a process of this machine, and its harness is `null`, which converses
and calls the task's tools. Programs whose packages are installed need neither uv nor downloads.
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
"""Name of an unset environment variable: the session is in the URL, so no key is needed."""
_RUNTIME = {"type": "subprocess"}
_HARNESS = "null"
_DEFAULT_HARNESS = "bash"
"""The default harness of `verifiers`, where neither taskset nor configuration names one."""


class EpisodeFailed(Exception):
    """The environment gave no reward for the episode."""


async def verifiers(
    ctx: Context,
    sample: SampleRequest,
    env: Mapping[str, Any],
    *,
    index: int = 0,
    renderer: Mapping[str, Any] | None = None,
    replayable: bool = True,
) -> list[Trajectory]:
    """Run an episode; return its trajectories with their reward. Raises the errors of `cairn.capture`, and
    EpisodeFailed.

    Args:
        env: the environment's configuration, as in the `[env]` block of `verifiers`.
        index: index of the task in the taskset, from 0.
        renderer: configuration of the renderer that converts messages to tokens, as in `verifiers`. The default is the
            model's chat template, which cannot read tool calls: for these name the renderer of the model's family, such
            as `{"name": "qwen3"}`.
        replayable: whether the environment may repeat what it does besides its requests to the policy.
    """
    # Importing `verifiers` takes seconds: a thread keeps the loop free for other samples.
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
        trajectories = session.trajectories() if session.exchanges else []
    return _rewarded(episode, trajectories)


def _environment_and_task(config: str, index: int) -> tuple["_Environments", Any]:
    with _reading:
        environments = _environments(config)
        return environments, environments.task(index)


_reading = threading.Lock()


class _Environments:
    """The environments and tasks of one configuration."""

    def __init__(self, text: str) -> None:
        """Read the configuration `text`, JSON."""
        config = json.loads(text)
        try:
            from verifiers.v1.utils.loaders import env_config_type, load_taskset, resolve_env_config
        except ModuleNotFoundError as error:
            why = f"cairn.verifiers needs the module {error.name!r}: pip install 'cairn-rl[verifiers]'"
            raise EpisodeFailed(why) from None
        uv.put_on_path()
        kind = env_config_type(config.get("taskset", {}).get("id", ""), config.get("id", ""))
        self.config = resolve_env_config({**config, **self._agents(kind, config)})
        self._tasks = iter(load_taskset(self.config.taskset))
        self._read: list[Any] = []

    def _agents(self, kind: Any, config: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of its agents, with defaults where the configuration has none."""
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import default_harness_id

        own = default_harness_id(config.get("taskset", {}).get("id", "")) != _DEFAULT_HARNESS
        harness = {} if own else {"harness": {"id": _HARNESS}}
        names = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
        return {name: {"runtime": _RUNTIME, **harness, **config.get(name, {})} for name in names}

    def task(self, index: int) -> Any:
        """Return a task of the taskset. Raises EpisodeFailed."""
        self._read.extend(itertools.islice(self._tasks, max(0, index + 1 - len(self._read))))
        if not 0 <= index < len(self._read):
            raise EpisodeFailed(f"{self.config.env_id} has {len(self._read)} tasks, but none with index {index}")
        return self._read[index]


_environments = cache(_Environments)


def _rewarded(episode: Any, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of an episode, with its reward. Raises EpisodeFailed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not end"
        raise EpisodeFailed(f"{episode.env.id}: {reason}")
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if len(trained) != 1:
        raise EpisodeFailed(f"{episode.env.id} has {len(trained)} trained agents: turn `trainable` off for all but one")
    if not trajectories:
        raise EpisodeFailed(f"{episode.env.id} sent its model no request")
    return [replace(trajectory, reward=trained[0].reward) for trajectory in trajectories]
