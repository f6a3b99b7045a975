"""Cost of durable turns for episodes, and memory of thousands of waiting episodes: the same episodes with and without
records, alternating.

    python -m bench.episodes [--open 2000] [--turns 3] [--tokens 8] [--wait 1] [--rounds 3] [--smoke] [--json FILE]

Each episode samples a few tokens from the policy, a tiny model on the transformers engine in this process. Then it
calls a tool that fetches a page from an HTTP server, which responds after `--wait` seconds. It repeats this `--turns`
times; all episodes run concurrently:

  with       each result for the code is recorded and logged to local files with fsync, as by a driver
  without    the same code in the same process, with a context that records nothing

A round is one of each, one after the other; the first is not counted. CPU seconds are those of the engine's process,
which is also the driver's here, and of the code's process. Memory is the peak of the code's process beyond its memory
with four episodes.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import transformers
from aiohttp import web
from rich.console import Console
from rich.table import Table

import cairn
from bench.command import parse, say
from bench.rollout import build_model
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import CallRecord, Recorded, SampleRequest, Segment, Trajectory
from cairn.engines.types.types import SamplingParams
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.call_log import CallLog
from cairn.storage.opening import open_store
from cairn.tasks.generation.calls import call_table
from tests.storage.builders import CONFIG

ROOT = str(Path(__file__).parents[1])
PAGE = "a page of the web, as long as one line of it"
WAYS = ("with", "without")

_sessions: dict[Any, aiohttp.ClientSession] = {}


@cairn.tool(kind="pure", timeout=300)
async def page(url: str) -> str:
    """Return the server's response."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
    async with _sessions[loop].get(url) as answer:
        return await answer.text()


class NoRecorder:
    """A recorder that stores nothing."""

    records, replaying, awaited, acting = True, False, None, False

    async def answer(
        self, call: CallRecord, do: Callable[[CallRecord], Awaitable[CallRecord]], **options: bool
    ) -> CallRecord:
        return await do(call)


async def generate(ctx: Context, sample: SampleRequest) -> Trajectory:
    """Generate the sample's number of turns, with a page after each."""
    if sample.metadata["way"] == "without":
        ctx._recorder = NoRecorder()  # type: ignore[assignment]
    ids, segments = list(sample.prompt_ids), list[Segment]()
    for _ in range(sample.metadata["turns"]):
        segments.append(await ctx.sample(ids))
        text = await ctx.call(page, {"url": sample.metadata["url"]})
        segments.append(Segment.given([20 + len(text) % 100]))
        ids += [*segments[-2].ids.tolist(), *segments[-1].ids.tolist()]
    return Trajectory(segments)


def serve_pages() -> None:
    """Serve pages, each after the seconds in its path. Runs in a separate process and prints its port."""

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.match_info["seconds"]))
        return web.Response(text=PAGE)

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/{seconds}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        await web.SockSite(runner, listener, backlog=4096).start()
        print(listener.getsockname()[1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def server() -> Iterator[str]:
    """Start a server and yield the URL of its pages."""
    command = [sys.executable, "-c", "from bench.episodes import serve_pages; serve_pages()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@dataclass(frozen=True)
class Outcome:
    """Measurements of all episodes, run once."""

    seconds: float
    cpu: float
    megabytes: float
    """Peak memory of the code's process."""
    records: int
    bytes: int
    """Size of the log."""


class Episodes:
    """An engine, and the code's process next to it."""

    def __init__(self, folder: Path, tokens: int, url: str, running: int) -> None:
        config = RolloutConfig(
            num_rollout=1,
            rollout_batch_size=1,
            rollout_max_response_len=tokens,
            num_threads=1,
            max_running_requests=running,
        )
        engine = TransformersEngine(str(build_model(64, folder / "model")), config)
        self._samples = SampleEngine(engine.open, engine.abort)
        self._params = SamplingParams(tokens)
        self._function = GenerateFunction("bench.episodes.generate", (ROOT, *sys.path))
        self._url = url
        self._ledger = Ledger.create(open_store(str(folder / "store")), "bench", CONFIG)
        self._ledger.acquire()
        self._times = itertools.count()

    def generate(self, way: str, count: int, turns: int, wait: float) -> Outcome:
        """Run all episodes concurrently, to their end."""
        words = {"way": way, "turns": turns, "url": f"{self._url}/{wait}"}
        samples = [SampleRequest(number, 0, [20, 21, 22], number, metadata=words) for number in range(count)]
        attempt = self._ledger.attempt(next(self._times), Step.ROLLOUT, "00-000")  # which has nothing to go on from
        before, began, records, ended = self._cpu(), time.perf_counter(), 0, 0
        with CallLog(attempt, way, encode=call_table) as log, self._most() as most:
            for message in self._samples.generate(samples, self._params, self._function):
                if isinstance(message, Recorded):
                    records += len(message.records)
                    log.append(*message.records)
                else:
                    ended += len(message)
                    wrong = [sample.error for sample in message if sample.error is not None]
                    assert not wrong, wrong[0]
        assert ended == count
        seconds = time.perf_counter() - began
        assert (records > 0) == (way == "with")
        parts = Path(self._ledger.store.url, attempt.folder).rglob("*.arrow")
        return Outcome(seconds, self._cpu() - before, most[0], records, sum(part.stat().st_size for part in parts))

    def _cpu(self) -> float:
        """Return the CPU seconds of this process and the code's."""
        return sum(sum(one.cpu_times()[:2]) for one in (psutil.Process(), *self._process()))

    def _process(self) -> list[psutil.Process]:
        code = self._samples._user_code
        return [] if code is None else [psutil.Process(code._child.pid)]

    @contextmanager
    def _most(self) -> Iterator[list[float]]:
        """Record the peak memory of the code's process while the block runs."""
        most, over = [0.0], threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                for process in self._process():
                    most[0] = max(most[0], process.memory_info().rss / 1e6)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield most
        finally:
            over.set()
            watcher.join()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=int, default=2000, help="episodes at a time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="of a turn")
    parser.add_argument("--wait", type=float, default=1.0, help="seconds after which the server answers")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, open=20, turns=2, tokens=3, wait=0.05, rounds=1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, server() as url:
        episodes = Episodes(Path(folder), arguments.tokens, url, running=min(256, arguments.open))
        idle = max(episodes.generate(way, 4, 1, 0.01).megabytes for way in WAYS)
        found: dict[str, list[Outcome]] = defaultdict(list)
        for turn in range(arguments.rounds + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                outcome = episodes.generate(way, arguments.open, arguments.turns, arguments.wait)
                say(f"turn {turn} of {arguments.rounds}, {way}: {outcome.seconds:.1f} s, CPU {outcome.cpu:.1f} s")
                if turn:
                    found[way].append(outcome)
    table = Table("", "s", "range", "CPU s", "episodes a second", "MB each above idle")
    for way in WAYS:
        seconds = [one.seconds for one in found[way]]
        middle = statistics.median(seconds)
        resident = max(one.megabytes for one in found[way]) - idle
        table.add_row(
            f"{way} records",
            f"{middle:.2f}",
            f"{min(seconds):.2f} – {max(seconds):.2f}",
            f"{statistics.median(one.cpu for one in found[way]):.2f}",
            f"{arguments.open / middle:.0f}",
            f"{resident / arguments.open:.3f}",
        )
    console = Console()
    console.print(table)
    pairs = list(zip(found["with"], found["without"], strict=True))
    longer = statistics.median(one.seconds / other.seconds for one, other in pairs) - 1
    more = statistics.median((one.cpu - other.cpu) / one.seconds for one, other in pairs)
    each = statistics.median((one.cpu - other.cpu) / one.records for one, other in pairs)
    size = found["with"][-1].bytes / found["with"][-1].records
    console.print(
        f"with records {100 * longer:+.1f} % of the time on the clock; {1e6 * each:.0f} µs of CPU and {size:.0f} bytes "
        f"a record, {100 * more:.1f} % of one core; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    if arguments.json is not None:
        rows = {way: [asdict(one) for one in outcomes] for way, outcomes in found.items()}
        arguments.json.write_text(json.dumps({"idle megabytes": idle, "outcomes": rows}, indent=1))


if __name__ == "__main__":
    main()
