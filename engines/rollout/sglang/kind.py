"""What the driver knows of `rollout.engine: sglang`."""

from collections.abc import Iterable

from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import EngineKind
from cairn.engines.rollout.sglang.launch_plan import launch_plan
from cairn.engines.rollout.sglang.permitted import PERMITTED, ROUTER_PERMITTED


def _problems(config: RunConfig, tells_kept: bool) -> Iterable[str]:
    from cairn.engines.rollout.sglang.problems import problems  # asks models and installations, which few need

    return problems(config, tells_kept)


def _kept_problems(rollout: RolloutConfig) -> Iterable[str]:
    from cairn.engines.rollout.sglang.kept import kept_problems

    return kept_problems(rollout)


KIND = EngineKind(
    engine="cairn.engines.rollout.sglang.engine:make",
    plan=launch_plan,
    options=("sglang", "router", "server_groups", "external_urls"),
    problems=_problems,
    router="cairn.engines.rollout.sglang.router:make",
    spans_gpus=True,
    holds_as_stored=True,
    takes_broadcasts=True,
    maps_gpu_memory=True,
    caches_prefixes=True,
    bounded_by="rollout.sglang_server_concurrency",
    kept_problems=_kept_problems,
    permitted={
        "rollout.sglang": PERMITTED,
        "rollout.server_groups.overrides": PERMITTED,
        "rollout.router": ROUTER_PERMITTED,
    },
)
