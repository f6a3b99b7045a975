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
from engines.rollout.sglang.server import Server, free_port
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
        self._timeout = config.timeout
        self._names = parameter_names(model_path)
        self.server = Server(installation.command(options), environment, port, log)
        self.server.wait_ready(start_timeout)
        self._control = Control(self.server.url, _CONTROL_TIMEOUT)
        self._missing: set[str] = set()
        self._updating: int | None = None
        self._in_use = threading.Lock()
        self._aborted = threading.Event()

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        validate_requests(requests, self._context, self._vocab)
        if self._updating is not None:
            raise EngineError("The engine is between begin and end of a weight update: end it before generating.")
        self._aborted.clear()
        return self._generate(list(requests))

    def _generate(self, requests: list[GenerateRequest]) -> Iterator[list[Completion]]:
        generation = Generation(self._control, self._context, self._timeout, self._aborted)
        with self._alone():
            try:
                yield from generation.run(requests)
            except EngineDied as error:
                raise EngineDied(f"{error}; {self.server.last_words()}") from error

    def abort(self) -> None:
        self._aborted.set()

    def get_weight_version(self) -> int | None:
        if self._updating is not None:
            return None
        return int(self._control.call("/get_model_info")["weight_version"])

    def begin_weight_update(self, version: int) -> None:
        with self._alone():
            if self._updating is not None:
                self._control.call("/end_weight_update", {})
            self._updating = version
            self._missing = set(self._names)
            self._control.call("/begin_weight_update", {})

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        if self._updating is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        unknown = [name for name in named_tensors if name not in self._names]
        if unknown:
            raise EngineError(
                f"The model has no weight {unknown[0]}: trainer and rollout engine hold different models."
            )
        self._control.update_from_tensor(named_tensors)
        self._missing -= set(named_tensors)

    def end_weight_update(self) -> None:
        if self._updating is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        if self._missing:
            raise EngineError(
                f"The update to version {self._updating} lacks {len(self._missing)} weights, the first of them "
                f"{min(self._missing)}: send every parameter between begin and end."
            )
        self._control.call("/end_weight_update", {})
        self._control.call("/flush_cache", {})
        self._control.call("/update_weight_version", {"new_version": str(self._updating), "abort_all_requests": False})
        self._updating = None

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
