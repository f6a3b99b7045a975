"""Which rollout engine a configuration means."""

from pathlib import Path

from cairn.configs.engines import reader_of
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.view import view
from cairn.engines.rollout.base import RolloutEngine
from cairn.engines.rollout.sglang.launch_plan import EnginePlan, Place


def make_engine(
    model_path: str,
    config: RolloutConfig,
    device: str,
    plan: EnginePlan,
    place: Place,
    log: Path,
    start_timeout: float,
    call_timeout: float,
) -> RolloutEngine:
    """The engine that `rollout.engine` names. `plan` and `place` say which server and where, `log` takes what it has to
    say, `start_timeout` is the seconds that it may take to serve, `call_timeout` those of a call.

    Raises BadModel, and where the engine is a server EngineDied and EngineTimeout.
    """
    config = view(config, reader_of("rollout"), "rollout")
    if config.engine == "sglang":
        from cairn.engines.rollout.sglang.engine import SGLangEngine

        return SGLangEngine(model_path, config, device, log, start_timeout, plan, place, call_timeout)
    from cairn.engines.rollout.transformers.engine import TransformersEngine

    return TransformersEngine(model_path, config, device)
