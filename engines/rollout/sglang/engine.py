"""SGLang behind the interface of a rollout engine."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from configs.schema.rollout import RolloutConfig
from engines.errors import EngineDied, EngineError, EngineTimeout
from engines.models import check_model_folder, context_length, parameter_names
from engines.rollout.requests import validate_requests
from engines.rollout.sglang.client import Control
from engines.rollout.sglang.installation import CPU_OPTIONS, Installation
from engines.rollout.sglang.server import Server, free_port
from engines.types import Completion, FinishReason, GenerateRequest

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_CONTROL_TIMEOUT = 60.0

Finished = queue.SimpleQueue[Completion | Exception | None]
"""Completions as they come, an error that ends them, and None at the end."""


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
        finished: Finished = queue.SimpleQueue()
        with self._alone():
            worker = threading.Thread(target=self._run, args=(requests, finished), daemon=True, name="sglang-client")
            worker.start()
            try:
                while (item := finished.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield [item]
            finally:
                self._aborted.set()
                worker.join()

    def _run(self, requests: list[GenerateRequest], finished: Finished) -> None:
        try:
            asyncio.run(self._generate_all(requests, finished))
        # Whatever it is belongs to the thread that waits for the completions.
        except ExceptionGroup as failed:
            finished.put(failed.exceptions[0])
        except Exception as error:
            finished.put(error)
        finally:
            finished.put(None)

    async def _generate_all(self, requests: list[GenerateRequest], finished: Finished) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.server.url, timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as group,  # whatever fails, the abort included, ends all
        ):
            watch = group.create_task(self._abort_when_told())
            calls = [
                group.create_task(self._sample(http, request, index))
                for request in requests
                for index in range(len(request.seeds))
            ]
            for call in asyncio.as_completed(calls):
                completion = await call
                if completion is not None:
                    finished.put(completion)
            watch.cancel()

    async def _sample(self, http: aiohttp.ClientSession, request: GenerateRequest, index: int) -> Completion | None:
        """One sample; None if it was aborted on request."""
        params = request.sampling_params
        body = {
            "input_ids": list(map(int, request.prompt_ids)),
            "sampling_params": {
                "max_new_tokens": min(params.max_new_tokens, self._context - len(request.prompt_ids)),
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
                "sampling_seed": request.seeds[index] % 2**31,
            },
            "return_logprob": True,
        }
        began = time.perf_counter()
        try:
            async with http.post("/generate", json=body) as reply:
                if reply.status != 200:
                    raise EngineError(f"/generate was refused ({reply.status}): {(await reply.text())[:500]}")
                content = await reply.json()
        except TimeoutError:
            raise EngineTimeout(f"/generate did not end within {self._timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineDied(f"the SGLang server is gone ({error}); {self.server.last_words()}") from error
        reason = content["meta_info"]["finish_reason"]["type"]
        if reason == "abort" and self._aborted.is_set():
            return None
        return _completion(request.request_id, index, content, time.perf_counter() - began)

    async def _abort_when_told(self) -> None:
        while not self._aborted.is_set():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._control.call, "/abort_request", {"rid": "", "abort_all": True})

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


def _completion(request_id: int, index: int, content: dict[str, Any], seconds: float) -> Completion:
    """From SGLang's reply."""
    meta = content["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason not in _FINISH:
        raise EngineError(f"a generation ended by {meta['finish_reason']}")
    log_probs = [entry[0] for entry in meta["output_token_logprobs"]]
    return Completion(
        request_id=request_id,
        sample_index=index,
        response_ids=np.asarray(content["output_ids"], np.int32),
        log_probs=np.asarray(log_probs, np.float32),
        finish_reason=_FINISH[reason],
        weight_version=int(meta["weight_version"]),
        seconds=seconds,
    )
