"""One SGLang server for all tests of a session: it takes most of a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema.rollout import RolloutConfig
from engines.rollout.sglang.engine import SGLangEngine

START_TIMEOUT = 240.0


def sglang_config(**options: object) -> RolloutConfig:
    """A small server; `options` are SGLang's own."""
    return RolloutConfig(
        engine="sglang",
        num_rollout=1,
        rollout_batch_size=1,
        rollout_max_response_len=32,
        max_running_requests=32,
        timeout=60,
        sglang={"max_total_tokens": 8192, **options},
    )


@pytest.fixture(scope="session")
def sglang_model(tiny_assets: Path) -> Path:
    return tiny_assets / "model"


@pytest.fixture(scope="session")
def engine(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    engine = SGLangEngine(str(sglang_model), sglang_config(), "cpu", log, START_TIMEOUT)
    yield engine
    engine.close()
