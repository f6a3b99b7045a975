"""The router in front of the servers: its process, and the servers that it knows.

A server is registered over the router's HTTP API, by POST to /workers. The router does this in the background, so a
server counts as registered only once GET /workers lists it as healthy. If a request fails on a server, the router
itself sends it to another one.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.processes.ports import free_port
from cairn.engines.rollout.sglang.installation import Installation
from cairn.engines.rollout.sglang.launch_plan import Worker
from cairn.engines.rollout.sglang.server import Server, Watch
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout

PROGRAM = Path(__file__).with_name("start_router.py")

READY = "/health"
"""Path that responds as soon as the router serves, also without any server."""

_CONTROL_TIMEOUT = 30.0
_POLL = 0.02

DEFAULTS: dict[str, Any] = {
    "health_check_interval_secs": 5,
    "log_level": "warn",  # else it writes four lines a request
}
"""Options of a router. Options of the configuration override them."""


class Router:
    """A router's process, without any server at first.

    Args:
        options: options of `sglang_router`, by its own names.
        host: address to listen on.
        log: file that its output is appended to.
        start_timeout: seconds until it must serve.
        interval: seconds between two health checks.
        silence: seconds without a response after which it is ended.

    Raises:
        SGLangMissing, EngineDied, EngineTimeout.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        host: str,
        log: Path,
        start_timeout: float,
        interval: float = 5.0,
        silence: float = 30.0,
    ) -> None:
        installation = Installation.find()
        port, metrics_port = free_port(host), free_port(host)
        addresses = {"host": host, "port": port, "prometheus_host": host, "prometheus_port": metrics_port}
        command = [str(installation.python), str(PROGRAM), json.dumps({**DEFAULTS, **options, **addresses})]
        environment = installation.environment(on_cpu=False, num_threads=1, variables={})
        self.process = Server(command, environment, port, log, host=host, name="router", ready=READY)
        self.process.wait_ready(start_timeout)
        self._http = httpx.Client(base_url=self.url, timeout=_CONTROL_TIMEOUT, trust_env=False)
        self._hung: str | None = None
        self._watch = Watch(self.url, interval, silence, self._end_hung, name="router", question=READY)

    @property
    def url(self) -> str:
        return self.process.url

    def serve(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Register exactly these servers, each with the fields of a Worker. Returns once the router lists them, and new
        ones as healthy. Raises EngineError where it does not."""
        wanted = {worker.url: worker for worker in (Worker(**fields) for fields in workers)}
        known = self.workers()
        for url in known.keys() - wanted.keys():
            self.remove(url)
        new = wanted.keys() - known.keys()
        for url in new:
            fields = {"url": url, "worker_type": wanted[url].worker_type, "bootstrap_port": wanted[url].bootstrap_port}
            self._call("POST", "/workers", {name: value for name, value in fields.items() if value is not None})
        self._wait(
            lambda: wanted.keys() == self.workers().keys() and new <= self.workers(healthy=True).keys(),
            f"add the servers {', '.join(sorted(wanted))}",
        )

    def remove(self, url: str) -> None:
        """Send no more requests to a server. Does nothing for an unknown server."""
        worker = self.workers().get(url)
        if worker is not None:
            self._call("DELETE", f"/workers/{worker}")
            self._wait(lambda: url not in self.workers(), f"remove the server {url}")

    def workers(self, *, healthy: bool = False) -> dict[str, str]:
        """Return the id of every server that the router has, or of those that are healthy, by the server's URL."""
        workers = self._call("GET", "/workers")["workers"]
        return {worker["url"]: worker["id"] for worker in workers if worker["is_healthy"] or not healthy}

    def health(self) -> dict[str, Any]:
        """Return the router's state. Keys: url, log, server_pid, workers. Raises EngineDied, also where the router was
        found to hang, and EngineTimeout."""
        if self._hung is not None or not self.process.alive():
            raise EngineDied(f"{self._hung or 'the router is gone'}; {self.process.last_words()}")
        return {
            "url": self.url,
            "log": str(self.process.log),
            "server_pid": self.process.pid,
            "workers": sorted(self.workers()),
        }

    def close(self) -> None:
        """End the router."""
        self._watch.end()
        self._http.close()
        self.process.stop()

    def _end_hung(self, seen: str) -> None:
        self._hung = f"{seen} and was given up"
        self.process.stop()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise EngineTimeout(f"{path} of the router at {self.url} did not answer in time") from None
        except httpx.TransportError as error:
            raise EngineDied(f"{path} of the router at {self.url}: {error}") from error
        if not reply.is_success:
            raise EngineError(f"{path} was refused by the router ({reply.status_code}): {reply.text[:500]}")
        return reply.json()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _CONTROL_TIMEOUT
        while not done():
            if time.monotonic() > end:
                raise EngineTimeout(
                    f"the router did not {what} within {_CONTROL_TIMEOUT:g} s; its log: {self.process.log}"
                )
            time.sleep(_POLL)


def make(options: Mapping[str, Any], config: RolloutConfig, host: str, log: Path, start_timeout: float) -> Router:
    """Make a router for a fleet."""
    interval, silence = config.rollout_health_check_interval, config.rollout_health_check_timeout
    return Router(options, host, log, start_timeout, interval, silence)
