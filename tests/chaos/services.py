"""What runs share where it is not the subject: Prefect and S3 servers, a Ray cluster to join, and undisturbed runs."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

from cairn.flows.history.fork import fork
from cairn.flows.orchestration.server import Server
from tests.chaos.configurations import CONFIGURATIONS, Origin, write_config
from tests.chaos.runs import ROOT, Disturbed
from tests.faulty_s3 import proxy_process
from tests.ray_fixtures import WITHOUT_TOKEN, ray_head
from tests.s3 import S3Server, moto_server
from tests.tiny_run import write_assets
from tests.waiting import wait_for


class UndisturbedFailed(Exception):
    """A run without faults did not end as it should; the message has its log."""


@dataclass
class Undisturbed:
    """A run without faults, to which others are compared."""

    run: Disturbed
    seconds: float


@dataclass
class Services:
    """Servers and runs that others share. Each is made when it is first needed, and ended by `close`."""

    folder: Path
    """Of everything: of each run by its name, and of what they share under `standing`."""
    warm: bool = False
    """Whether the drivers of runs made here are forked from a process that has made their imports."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _undisturbed: dict[str, Undisturbed] = field(default_factory=dict)

    def close(self) -> None:
        """End it all; the folders stay."""
        self._stack.close()

    def run(self, name: str, configuration: str) -> Disturbed:
        """A run that is yet to begin, in a folder of its own, and on a cluster of its own unless it is to join one."""
        joins = CONFIGURATIONS[configuration].joined
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        address = self._cluster[0] if joins else None
        run = Disturbed(
            folder,
            write_config(configuration, self.assets, folder, self._graders, address),
            {"PREFECT_API_URL": self.api_url, "PYTHONPATH": os.environ["PYTHONPATH"]}
            | (WITHOUT_TOKEN if joins else {}),
            cluster=self._cluster[1] if joins else None,
            warm=self.warm,
        )
        if (origin := CONFIGURATIONS[configuration].forked_from) is not None:
            self._fork(run, origin)
        return run

    def _fork(self, run: Disturbed, origin: Origin) -> None:
        """Make the run a fork of an undisturbed one, which gets a copy in the run's own store."""
        parent = self.undisturbed(origin.configuration).run
        shutil.copytree(parent.folder / "runs", run.folder / "runs")
        run.name = "forked"
        forked = fork(parent.ledger(run.store_url), origin.iteration, run.name, origin.overrides)
        run.config_file.write_text(json.dumps(forked.manifest.config))

    @contextmanager
    def on_s3(self, run: Disturbed) -> Iterator[None]:
        """Put a run into a bucket behind a proxy of its own; this process reads it past the proxy."""
        with proxy_process(self.s3.endpoint) as proxy:
            run.store_url = f"s3://{self.s3.new_bucket()}/chaos"
            run.environment = {**run.environment, **self.s3.env, "AWS_ENDPOINT_URL": proxy.endpoint}
            for name, value in self.s3.env.items():
                self._set_environment(name, value)
            yield

    def undisturbed(self, configuration: str) -> Undisturbed:
        """Return the run of a configuration without faults. Raises UndisturbedFailed."""
        if configuration not in self._undisturbed:
            run, began = self.run(f"undisturbed-{configuration}", configuration), time.monotonic()
            if run.drive() != 0:
                raise UndisturbedFailed(f"the undisturbed run of {configuration} failed:\n{run.log()}")
            self._undisturbed[configuration] = Undisturbed(run, time.monotonic() - began)
        return self._undisturbed[configuration]

    @cached_property
    def assets(self) -> Path:
        """Model and data of all runs."""
        folder = self.folder / "standing" / "assets"
        folder.mkdir(parents=True, exist_ok=True)
        return write_assets(folder)

    @cached_property
    def api_url(self) -> str:
        """Of the Prefect server."""
        server = Server(self.folder / "standing" / "prefect")
        self._stack.callback(server.stop)
        server.wait_ready()
        return server.api_url

    @cached_property
    def s3(self) -> S3Server:
        """The S3 server."""
        return self._stack.enter_context(moto_server())

    @cached_property
    def _graders(self) -> Path:
        """A folder of PYTHONPATH: only code that lies there may be named by a store."""
        folder = self.folder / "standing" / "graders"
        folder.mkdir(parents=True, exist_ok=True)
        before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._set_environment("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder), *before]))
        return folder

    @cached_property
    def _cluster(self) -> tuple[str, psutil.Process]:
        """Address and raylet of a cluster that drivers join."""
        assert self._graders
        address = self._stack.enter_context(ray_head(environment=WITHOUT_TOKEN))
        host, _, port = address.rpartition(":")
        mine = psutil.Process()
        (raylet,) = wait_for(
            lambda: [p for p in mine.children(recursive=True) if p.name() == "raylet" and host in " ".join(p.cmdline())]
        )
        return f"127.0.0.1:{port}", raylet

    def _set_environment(self, name: str, value: str) -> None:
        """Of this process, for what it calls on runs and what it starts, until `close`."""
        before = os.environ.get(name)
        os.environ[name] = value
        self._stack.callback(lambda: os.environ.pop(name) if before is None else os.environ.update({name: before}))
