"""Which architectures SGLang serves on a CPU: `python -m tests.sglang_architectures [NAME …]` starts a server for each,
most of a minute each, and prints and records what it finds.

The tests start those of `TESTED` alone. Results of the others, and of those that it does not serve, are recorded here
and in `cairn.engines.rollout.sglang.problems`.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.rollout.sglang.problems import UNSERVED
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import GenerateRequest
from tests.architectures import ARCHITECTURES, Architecture
from tests.engines.models.test_iteration import requests
from tests.engines.rollout.models import full_log_probs
from tests.model_table import Check, record
from tests.requests import by_id
from tests.sglang_server import START_TIMEOUT, sglang_config

TESTED = ("qwen3_moe", "llama3.1", "glm4", "glm4_moe")
MEASURED = {
    "qwen2": 1.2e-06,
    "qwen3": 1.4e-06,
    "llama": 8.0e-07,
    "glm4_moe_air": 9.7e-07,
    "seed_oss": 9.5e-07,
    "mistral": 1.0e-06,
}
"""Of those that are served and not tested each time: the largest difference that was found."""


def start(folder: Path, log: Path) -> SGLangEngine:
    """A server of a model. Raises EngineError where it does not start."""
    return SGLangEngine(str(folder), sglang_config(), "cpu", log, START_TIMEOUT)


def largest_difference(engine: SGLangEngine, folder: Path) -> float:
    """Between the server's log-probs and those of transformers in float32. Raises EngineError where it fails."""
    sent: Sequence[GenerateRequest] = requests(max_new_tokens=12)
    samples, model = by_id(engine.generate(sent)), load_causal_lm(folder, torch.float32)
    return max(
        float(abs(full_log_probs(model, one, samples[one.request_id]) - samples[one.request_id].log_probs).max())
        for one in sent
    )


def reason(of: Architecture) -> str | None:
    """Why it is not served."""
    return UNSERVED.get(of.model_type)


def main(names: Sequence[str]) -> None:
    """Try some, or all."""
    for of in ARCHITECTURES:
        if names and of.name not in names:
            continue
        with tempfile.TemporaryDirectory() as work:
            folder, log = of.save(Path(work, "model")), Path(work, "server.log")
            engine = None
            try:
                engine = start(folder, log)
                found: float | str = largest_difference(engine, folder)
                record(of.name, Check.SGLANG, found)
            except EngineError as error:
                found = f"{error}\n{log.read_text()}"
            finally:
                if engine is not None:
                    engine.close()
            print(f"{of.name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
