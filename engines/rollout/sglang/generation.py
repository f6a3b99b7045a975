"""Generation through SGLang's HTTP interface: one `/generate` a sample, all of them at once."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np

from engines.errors import EngineDied, EngineError, EngineTimeout
from engines.rollout.sglang.client import Control
from engines.types import Completion, FinishReason, GenerateRequest

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

Finished = queue.SimpleQueue[Completion | Exception | None]
"""Completions as they come, an error that ends them, and None at the end."""


class Generation:
    """One call of `generate`, in a thread with an event loop of its own.

    Args:
        control: of the server.
        context: most tokens of a prompt and its response.
        timeout: seconds that a sample may take.
        aborted: ends the generation when set.
    """

    def __init__(self, control: Control, context: int, timeout: float, aborted: threading.Event) -> None:
        self._control = control
        self._context = context
        self._timeout = timeout
        self._aborted = aborted

    def run(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Yield each sample as it finishes. Raises EngineDied, EngineTimeout and EngineError."""
        finished: Finished = queue.SimpleQueue()
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
            aiohttp.ClientSession(self._control.url, timeout=timeout, connector=connector) as http,
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
            raise EngineDied(f"/generate of {self._control.url}: {error}") from error
        reason = content["meta_info"]["finish_reason"]["type"]
        if reason == "abort" and self._aborted.is_set():
            return None
        return _completion(request.request_id, index, content, time.perf_counter() - began)

    async def _abort_when_told(self) -> None:
        while not self._aborted.is_set():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._control.call, "/abort_request", {"rid": "", "abort_all": True})


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
        weight_versions=_weight_versions(meta, len(log_probs)),
        finish_reason=_FINISH[reason],
        seconds=seconds,
        cached_tokens=meta.get("cached_tokens", 0),
    )


def _weight_versions(meta: dict[str, Any], length: int) -> np.ndarray:
    """[T] int32 from the runs of tokens that the server reports."""
    versions = np.full(length, int(meta["weight_version"]), np.int32)
    for run in meta.get("weight_versions") or []:
        versions[run["start"] : run["end"]] = int(run["version"])
    return versions
