"""The launch plan of a configuration: which servers to launch, on how many machines each, with which options.

A pure function: it queries neither the machine nor SGLang. Addresses and ports are determined where the servers start.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cairn.configs.engines import ENGINES
from cairn.configs.schema.rollout import RolloutConfig, ServerGroup
from cairn.configs.view import Reader, view
from cairn.engines.rollout.plan import EnginePlan, LaunchPlan

WorkerType = Literal["regular", "prefill", "decode"]

READER = Reader("the launch plan", f"READER in {__name__}", (*ENGINES["rollout"], "rollout.num_engines"))
"""Reader of the options that each engine is made from, and of the number of engines."""


@dataclass(frozen=True)
class ServerPlan(EnginePlan):
    """Plan of a server, which has several processes if it spans machines, or of a server that runs elsewhere."""

    worker_type: WorkerType = "regular"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the server, without addresses and ranks."""
    external_url: str | None = None
    """Address of a server that runs elsewhere."""


@dataclass(frozen=True)
class Worker:
    """A server, as routers are configured with it."""

    url: str
    worker_type: WorkerType = "regular"
    bootstrap_port: int | None = None
    """Port of a prefill server where decode servers fetch keys and values."""


def server_options(config: RolloutConfig) -> list[dict[str, Any]]:
    """Return the configured options of the servers of each group."""
    return [{**config.sglang, **group.overrides} for group in config.server_groups] or [dict(config.sglang)]


def launch_plan(config: RolloutConfig, releases_memory: bool = False) -> LaunchPlan:
    """Return what a configuration without `plan_problems` launches. With `releases_memory`, servers on GPUs can
    release their memory."""
    config = view(config, READER, "rollout")
    engines = [ServerPlan(external_url=url) for url in config.external_urls]
    if not engines:
        for group in _groups(config):
            engines += [_server(config, group, releases_memory)] * group.count(config.num_gpus_per_engine)
    router = config.router
    if router is not None and any(engine.worker_type != "regular" for engine in engines):
        router = {**router, "pd_disaggregation": True}
    return LaunchPlan(tuple(engines), router)


def plan_problems(config: RolloutConfig) -> Iterator[str]:
    """Yield sentences on what cannot be launched."""
    for group in _groups(config):
        yield from _size_problems(config, group)
        if why := takes_no_weights({**config.sglang, **group.overrides}):
            yield f"rollout.sglang or rollout.server_groups has {why}"
    kinds = {group.worker_type for group in config.server_groups}
    for kind, other in (("prefill", "decode"), ("decode", "prefill")):
        if kind in kinds and other not in kinds:
            yield f"rollout.server_groups has {kind} servers but no {other} servers: add a group of them"
    if len(kinds) > 1 and "regular" in kinds:
        yield (
            "rollout.server_groups mixes regular servers with prefill and decode servers, which a router cannot serve "
            "at once: leave one kind out"
        )
    if kinds - {"regular"} and config.router is None:
        yield "rollout.server_groups has prefill and decode servers, which need a router: set rollout.router"


def without_gpu(config: RolloutConfig) -> bool:
    """Return whether any server is launched without a GPU."""
    return any(not _num_gpus(config, group) for group in _groups(config))


def takes_no_weights(options: Mapping[str, Any]) -> str | None:
    """Return why a server with these options cannot receive the run's weights; None if it can."""
    if (stages := options.get("pp_size") or 1) > 1:
        return f"pp_size = {stages}, but weight updates do not support pipeline stages: leave it out, and set tp_size"
    if (copies := options.get("dp_size") or 1) > 1 and not options.get("enable_dp_attention"):
        return (
            f"dp_size = {copies}, but SGLang updates only one copy of a model: leave it out and set more engines, or "
            "set attn_dp_size, which divides attention alone"
        )
    return None


def _groups(config: RolloutConfig) -> tuple[ServerGroup, ...]:
    if config.external_urls:
        return ()
    return config.server_groups or (ServerGroup(num_engines=config.num_engines),)


def _num_gpus(config: RolloutConfig, group: ServerGroup) -> float:
    return config.num_gpus_per_engine if group.num_gpus_per_engine is None else group.num_gpus_per_engine


def _server(config: RolloutConfig, group: ServerGroup, releases_memory: bool) -> ServerPlan:
    options = {**config.sglang, **group.overrides}
    num_gpus = _num_gpus(config, group)
    if releases_memory and num_gpus:
        options.setdefault("enable_memory_saver", True)
    nnodes = 1
    if num_gpus > 1:
        nnodes = max(1, int(num_gpus // config.num_gpus_per_node))
        options.setdefault("tp_size", int(num_gpus))
    if group.worker_type != "regular":
        options["disaggregation_mode"] = group.worker_type
    return ServerPlan(nnodes, num_gpus / nnodes, group.worker_type, options)


def _size_problems(config: RolloutConfig, group: ServerGroup) -> Iterator[str]:
    num_gpus, per_node = _num_gpus(config, group), config.num_gpus_per_node
    options = {**config.sglang, **group.overrides}
    if num_gpus > 1 and num_gpus % 1:
        yield f"an engine of {num_gpus:g} GPUs cannot be placed: num_gpus_per_engine is at most 1 or a whole number"
        return
    if num_gpus > per_node and num_gpus % per_node:
        yield (
            f"an engine of {num_gpus:g} GPUs does not fill whole machines of {per_node}: make num_gpus_per_engine a "
            "multiple of rollout.num_gpus_per_node"
        )
    used = options.get("tp_size", num_gpus)
    if num_gpus >= 1 and used != num_gpus and takes_no_weights(options) is None:
        yield (
            f"rollout.sglang.tp_size is {used}, but an engine has {num_gpus:g} GPUs: leave tp_size out, or make "
            "num_gpus_per_engine the same"
        )
