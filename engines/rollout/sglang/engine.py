"""SGLang behind the interface of a rollout engine."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.schema.rollout import RolloutConfig
from engines.errors import EngineDied, EngineError
from engines.models import check_model_folder, context_length, parameter_names
from engines.rollout.requests import validate_requests
from engines.rollout.sglang.client import Control
from engines.rollout.sglang.generation import Generation
from engines.rollout.sglang.installation import CPU_OPTIONS, Installation
from engines.rollout.sglang.route import Route
from engines.rollout.sglang.server import Server, free_port
from engines.rollout.sglang.weights import ServerWeights
from engines.types import Completion, GenerateRequest

_CONTROL_TIMEOUT = 60.0


class SGLangEngine:
    """A `RolloutEngine` that owns one SGLang server.

    Args:
        model_path: folder in Hugging Face format.
        config: of it, `sglang`, `dtype`, `num_threads`, `max_running_requests` and `timeout` are read.
        device: "cpu" or "cuda".
        log: file that the server's output is appended to.
        start_timeout: seconds until the server must serve.

    Raises:
        BadModel, SGLangMissing, EngineDied, EngineTimeout.
    """

    def __init__(
        self, model_path: str, config: RolloutConfig, device: str, log: Path, start_timeout: float = 600.0
    ) -> None:
        model = check_model_folder(model_path)
        self._context, self._vocab = context_length(model), model.vocab_size
        installation = Installation.find()
        port = free_port()
        options: dict[str, Any] = {
            "model_path": model_path,
            "dtype": config.dtype,
            "max_running_requests": config.max_running_requests,
            "host": "127.0.0.1",
            "port": port,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "weight_version": "0",
            **(CPU_OPTIONS if device == "cpu" else {}),
            **config.sglang,
        }
        environment = installation.environment(on_cpu=device == "cpu", num_threads=config.num_threads)
        self._model_path = model_path
        self._deterministic = bool(options.get("enable_deterministic_inference"))
        self._timeout, self._concurrency = config.timeout, config.sglang_server_concurrency
        self.server = Server(installation.command(options), environment, port, log)
        self.server.wait_ready(start_timeout)
        self.route = Route.to(self.server.url)
        """Where its requests go: to its own server, unless a fleet has a router."""
        self._control = Control(self.server.url, _CONTROL_TIMEOUT)
        self._weights = ServerWeights(self._control, parameter_names(model_path))
        self._in_use = threading.Lock()
        self._aborted = threading.Event()

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        validate_requests(requests, self._context, self._vocab)
        self._weights.require_whole()
        self._aborted.clear()
        return self._generate(list(requests))

    def _generate(self, requests: list[GenerateRequest]) -> Iterator[list[Completion]]:
        generation = Generation(self.route, self._context, self._timeout, self._concurrency, self._aborted)
        with self._alone():
            try:
                yield from generation.run(requests)
            except EngineDied as error:
                raise EngineDied(f"{error}; {self.server.last_words()}") from error

    def abort(self) -> None:
        self._aborted.set()

    def get_weight_version(self) -> int | None:
        return self._weights.version()

    def begin_weight_update(self, version: int) -> None:
        with self._alone():
            self._weights.begin(version)

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        self._weights.load(named_tensors)

    def end_weight_update(self) -> None:
        self._weights.end()

    def weights_checksum(self) -> str:
        raise EngineError("SGLang's servers give no checksum of their weights; compare log-probs instead.")

    def check_batch_invariance(self) -> bool:
        """Only SGLang's deterministic inference makes a sample independent of its company."""
        return self._deterministic

    def health(self) -> dict[str, Any]:
        """Keys: model, url, log, server_pid, weight_version, and loads: what the server runs and queues."""
        if not self.server.alive():
            raise EngineDied(f"the SGLang server is gone; {self.server.last_words()}")
        loads = self._control.call("/v1/loads")
        return {
            "model": self._model_path,
            "url": self.server.url,
            "log": str(self.server.log),
            "server_pid": self.server.pid,
            "weight_version": self.get_weight_version(),
            "loads": loads,
        }

    def close(self) -> None:
        """End the server."""
        self._control.close()
        self.server.stop()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise EngineError("The engine is generating: abort that call or let it end first.")
        try:
            yield
        finally:
            self._in_use.release()
