"""One SGLang server for all tests of a session: it takes most of a minute to start."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.sglang.engine import SGLangEngine
from tests.waiting import wait_for

START_TIMEOUT = 240.0


def sglang_config(**options: object) -> RolloutConfig:
    """A small server; `options` are SGLang's own."""
    return RolloutConfig(
        engine="sglang",
        num_rollout=1,
        rollout_batch_size=1,
        rollout_max_response_len=32,
        max_running_requests=32,
        timeout=180,
        sglang={"max_total_tokens": 8192, **options},
    )


@pytest.fixture(scope="session")
def sglang_model(tiny_assets: Path) -> Path:
    return tiny_assets / "model"


@pytest.fixture(scope="session")
def engine(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("SPT_NOENV", "1")  # else the titles of its processes overwrite what Linux shows of their variables
        shell.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")  # log-probs that know of no temperature, if it were heeded
        engine = SGLangEngine(str(sglang_model), sglang_config(), "cpu", log, START_TIMEOUT)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def engine_with_tokenizer(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Whose server finds stop strings, and has OpenAI's interface."""
    log, config = tmp_path_factory.mktemp("logs") / "server.log", sglang_config()
    config = config.model_copy(update={"rollout_stop": ("END",)})
    engine = SGLangEngine(str(sglang_model), config, "cpu", log, START_TIMEOUT)
    yield engine
    engine.close()


def running(health: dict[str, Any]) -> int:
    """Requests that a server runs or queues, by what its engine says of itself."""
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in health["loads"]["loads"])


def is_decoding(health: dict[str, Any]) -> bool:
    """Whether the server has sampled some tokens of what it runs: prompts of up to four tokens count for less."""
    return any(load["num_used_tokens"] > 10 * load["num_running_reqs"] > 0 for load in health["loads"]["loads"])


@contextmanager
def once_decoding(health: Callable[[], dict[str, Any]], act: Callable[[], Any]) -> Iterator[None]:
    """Have another thread do something as soon as the server is at work on what the body asks of it."""

    def wait_and_act() -> None:
        wait_for(lambda: is_decoding(health()), 60)
        act()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(wait_and_act)
        yield
        acting.result()
