"""The driver's knowledge of `rollout.engine: transformers`."""

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.plan import EngineKind, EnginePlan, LaunchPlan


def _plan(config: RolloutConfig, releases_memory: bool) -> LaunchPlan:
    return LaunchPlan((EnginePlan(num_gpus=config.num_gpus_per_engine),) * config.num_engines)


KIND = EngineKind(
    engine="cairn.engines.rollout.transformers.engine:make", plan=_plan, reports_checksum=lambda config: True
)
