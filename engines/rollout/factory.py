"""Which rollout engine a configuration means."""

from pathlib import Path

from configs.schema.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine


def make_engine(
    model_path: str, config: RolloutConfig, device: str, *, log: Path, start_timeout: float
) -> RolloutEngine:
    """The engine that `rollout.engine` names. `log` takes what a server of its own has to say, `start_timeout` is the
    seconds that such a server may take to serve.

    Raises BadModel, and where the engine is a server EngineDied and EngineTimeout.
    """
    if config.engine == "sglang":
        from engines.rollout.sglang.engine import SGLangEngine

        return SGLangEngine(model_path, config, device, log, start_timeout)
    from engines.rollout.transformers import TransformersEngine

    return TransformersEngine(model_path, config, device)
