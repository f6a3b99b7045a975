"""Launch of a `ServerPlan`: of one server, or of one machine's part of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.processes.fingerprint import SGLANG, server_environment
from cairn.engines.processes.ports import free_port
from cairn.engines.rollout.plan import Place
from cairn.engines.rollout.sglang.installation import CPU_OPTIONS, Installation
from cairn.engines.rollout.sglang.launch_plan import ServerPlan, Worker, takes_no_weights
from cairn.engines.rollout.sglang.server import ExternalServer, Server
from cairn.engines.types.errors import BadModel, EngineDied, EngineError
from cairn.storage.records import Environment
from cairn.storage.store.canonical import from_json

# Code in a model folder. SGLang runs it if it does not know the model's architecture, whatever `trust_remote_code`
# says. So SGLang gets a folder that names code only on request.


def code_problem(path: str, *options: Mapping[str, Any]) -> str | None:
    """Return a sentence if the config.json of a model folder names code (`auto_map`) that none of the servers' options
    trust.

    Raises:
        BadModel: the file is missing or broken.
    """
    if any(of_server.get("trust_remote_code") for of_server in options):
        return None
    file = Path(path) / "config.json"
    try:
        names_code = _names_code(from_json(file.read_text()))
    except (OSError, ValueError) as error:
        raise BadModel(f"{file} cannot be read: {error}") from error
    if not names_code:
        return None
    return (
        f"{file} names its own code (auto_map), which SGLang may run: remove auto_map, or set "
        "rollout.sglang.trust_remote_code=true"
    )


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "auto_map" in value or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


POLLED = ("/v1/loads", "/server_info", "/get_model_info", "/health")
"""Paths that Cairn requests so often that a server's log would contain little else."""


@dataclass(frozen=True)
class Launched:
    """A server that is ready."""

    server: Server | ExternalServer
    worker: Worker
    """The server, as routers are configured with it."""
    deterministic: bool
    """Whether its samples do not depend on their batch."""
    environment: Environment
    """The environment that it computes on."""


def launch(
    model_path: str,
    config: RolloutConfig,
    device: str,
    plan: ServerPlan,
    place: Place,
    log: Path,
    start_timeout: float,
) -> Launched:
    """Start a process of an engine, or connect to a server that runs elsewhere, and wait until it serves.

    Raises SGLangMissing, EngineDied, EngineTimeout, and EngineError where the server cannot receive weights.
    """
    if plan.external_url is not None:
        external = ExternalServer(plan.external_url)
        external.wait_ready(start_timeout)
        reported = external.options()
        if why := takes_no_weights(reported):
            raise EngineError(f"the server at {external.url} of rollout.external_urls has {why}")
        if config.rollout_stop and reported.get("skip_tokenizer_init"):
            raise EngineError(
                f"the server at {external.url} of rollout.external_urls has no tokenizer (skip_tokenizer_init), which "
                "rollout.rollout_stop needs: start it with one, or leave the strings out"
            )
        deterministic = bool(reported.get("enable_deterministic_inference"))
        return Launched(external, Worker(external.url), deterministic, external.environment())
    if (problem := code_problem(model_path, plan.options)) is not None:
        raise EngineError(problem)
    installation = Installation.find()
    port = free_port(place.host)
    bootstrap_port = free_port(place.host) if plan.worker_type == "prefill" else None
    options: dict[str, Any] = {
        "model_path": model_path,
        "dtype": config.dtype,
        "max_running_requests": config.max_running_requests,
        "host": place.host,
        "port": port,
        "skip_tokenizer_init": not config.rollout_stop,
        # On a GPU the first batches compile kernels: a first request does it before the server counts as ready.
        "skip_server_warmup": device == "cpu" or plan.worker_type != "regular",
        "weight_version": "0",
        "uvicorn_access_log_exclude_prefixes": POLLED,
        "disaggregation_bootstrap_port": bootstrap_port,
        **(CPU_OPTIONS if device == "cpu" else {}),
        **plan.options,
    }
    if plan.nnodes > 1:
        options |= {"nnodes": plan.nnodes, "node_rank": place.node_rank, "dist_init_addr": place.dist_init_addr}
    environment = installation.environment(
        on_cpu=device == "cpu", num_threads=config.num_threads, variables=config.sglang_env_vars
    )
    ranks = options.get("tp_size", 1)
    if device == "cpu" and ranks > 1:  # else SGLang wants a NUMA node for each
        cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    server = Server(installation.command(options), environment, port, log, host=place.host)
    server.wait_ready(start_timeout)
    deterministic = bool(options.get("enable_deterministic_inference"))
    computes_on = server_environment(device == "cpu", config.num_threads, installation.versions(SGLANG))
    return Launched(server, Worker(server.url, plan.worker_type, bootstrap_port), deterministic, computes_on)


class FurtherRank:
    """A further machine's part of an engine: a process that only reports that it is alive."""

    def __init__(self, launched: Launched) -> None:
        self._server = launched.server
        self._environment = launched.environment

    def environment(self) -> Environment:
        """Return the environment that the process computes on."""
        return self._environment

    def health(self) -> dict[str, Any]:
        """Return the process's state. Keys: log, server_pid. Raises EngineDied."""
        if not self._server.alive():
            raise EngineDied(f"a process of an SGLang server is gone; {self._server.last_words()}")
        return {"log": str(self._server.log), "server_pid": self._server.pid}

    def close(self) -> None:
        """End the process."""
        self._server.stop()
