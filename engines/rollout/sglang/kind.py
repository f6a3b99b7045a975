"""What the driver knows of `rollout.engine: sglang`."""

from collections.abc import Iterable

from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import Kind
from cairn.engines.rollout.sglang.launch_plan import launch_plan


def _problems(config: RunConfig, tells_kept: bool) -> Iterable[str]:
    from cairn.engines.rollout.sglang.problems import problems  # asks models and installations, which few need

    return problems(config, tells_kept)


KIND = Kind(
    engine="cairn.engines.rollout.sglang.engine:make",
    plan=launch_plan,
    options=("sglang", "router", "server_groups", "external_urls"),
    problems=_problems,
    router="cairn.engines.rollout.sglang.router:make",
    spans_gpus=True,
    takes_broadcasts=True,
    maps_gpu_memory=True,
)
