"""Cost of a long history: requests and seconds on a Ceph object gateway, by the number of iterations of a run.

    python -m bench.ledger [--iterations 100 1000 10000] [--shards 2] [--read 1000] [--epochs 1000] [--smoke]
        [--store URL] [--json FILE]

Writes runs of two or more shards of rollout and reward an iteration, filter, advantage, train and sync, with a
checkpoint and a benchmark every tenth, as a driver writes them, but without the snapshots' files, which no listing
shows. The newest iteration ends after its train step, as if the driver had been killed there. Of runs longer than
`--read`, only the last iterations have commits; each one before has one file, so that its folder is listed. Then it
measures, each with its own connection, and counting every HTTP request:

  resume   a driver's requests from opening the run to the step at which it resumes; the six requests
           before that verify a store are not counted
  status   `cairn status`
  runs     `cairn runs` over all runs written so far
  verify   `cairn verify`: all commits; for runs up to `--read` iterations, because it takes minutes on longer ones
  gc       `cairn gc`, a dry run; for the same runs
  acquire  acquiring a lease that has changed hands `--epochs` times
  memory   resident memory of a process that resumes the run and commits three more iterations, with everything that a
           driver imports; engines and Prefect's server are not started, and no samples pass through it

The gateway is a real one, from Debian's packages (see tests/ceph/rgw.py), on this machine: for a remote store, add a
network round trip to each request. `--store FOLDER` measures local files, without requests.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain, groupby
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import s3fs
from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from bench.gateway import STORE_HELP, bucket
from cairn.configs import loader
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.membership import Membership
from cairn.flows.reading.views import all_runs, run_status
from cairn.flows.train import report_changed_environment
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import Lease, Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.shards import SHARED, record_bytes, repeated_from
from cairn.storage.opening import open_store
from cairn.storage.records import Environment
from cairn.storage.store.s3 import S3Store
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import garbage
from cairn.storage.upkeep.retention import newest_checkpoint
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.evaluation.evaluate import eval_due, eval_shard
from cairn.tasks.trainer.checkpoint import checkpoint_due

ENVIRONMENT = Environment(device="cpu", threads=1, host="box", versions={"python": "3.11", "torch": "2.13"})
TWO = ("00-000", "00-001")
"""Shards of a small round."""
OF_A_RECORD = 32
"""Commits of shards that share a record: a record a second in a round of 256 shards that takes 16 seconds."""
WHOLE = 20
"""Iterations at the end of a long run whose commits can be read: as far back as a driver looks for its newest
checkpoint."""
MORE = 3
"""Iterations that a resumed run is continued for."""
WRITERS = 2
REQUESTS = 16


class CountingStore(S3Store):
    """Counts the requests that it sends, retries included."""

    requests = 0

    def _connect(self) -> s3fs.S3FileSystem:
        connection = super()._connect()
        connection.s3.meta.events.register("request-created.s3", self._count_request)
        return connection

    def _count_request(self, **_: Any) -> None:
        self.requests += 1


def opened(url: str) -> Store:
    """Return the store at a URL; an object store counts its requests."""
    if url.startswith("s3://"):
        return CountingStore(url)
    return open_store(url)


def config_of(iterations: int) -> RunConfig:
    """Return the configuration of a run with one iteration more than `iterations`."""
    benchmark = {"name": "heldout", "path": "test.jsonl", "max_response_len": 8}
    return loader.parse(
        {
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "rollout": {
                "num_rollout": iterations + 1,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "num_engines": 2,
                "rollout_max_response_len": 8,
            },
            "checkpoint": {"save_interval": 10},
            "eval": {"eval_interval": 10, "benchmarks": [benchmark]},
        }
    )


def commits_of(run: str, iterations: int, shards: Sequence[str] = TWO, first: int = 0) -> Iterator[Commit]:
    """Yield all commits of a run from an iteration on, each with inputs from the earlier ones."""
    config, trained = config_of(iterations), None
    for index in range(first, iterations):

        def commit(step: Step, shard: str | None, inputs: list[Commit], index: int = index, **fields: Any) -> Commit:
            return Commit(
                run=run,
                iteration=index,
                step=step,
                shard=shard,
                attempt=layout.attempt_name(shard, 1, "0123456789ab"),
                epoch=1,
                inputs={commit.name: commit.digest for commit in inputs},
                config_digest="0" * 64,
                started_at=float(index),
                committed_at=float(index),
                timings={"run": 1.0, "write": 0.1},
                environment=ENVIRONMENT,
                **fields,
            )

        before = [trained] if trained else []
        metrics = {"response_tokens": 8, "generated_groups": 1, "recovered_groups": 0}
        rollouts = [commit(Step.ROLLOUT, shard, before, metrics=metrics) for shard in shards]
        rewards = [commit(Step.REWARD, at, [made]) for at, made in zip(shards, rollouts, strict=True)]
        values = {"full": True, "missing": 0, "cursor": 2 * (index + 1), "round": 0, "buffered": 0, "unfinished": 0}
        selection = commit(Step.FILTER, "00", [*rollouts, *rewards], values=values)
        advantages = commit(Step.ADVANTAGE, None, [selection, *rollouts, *rewards], metrics={"raw_reward": 0.5})
        trained = commit(
            Step.TRAIN, None, [*before, selection, *rollouts, advantages],
            weight_version_in=index, weight_version_out=index + 1, state_digest=f"{index + 1:064x}",
        )  # fmt: skip
        yield from [*rollouts, *rewards, selection, advantages, trained]
        if index + 1 == iterations:
            return
        yield commit(Step.SYNC, None, [trained])
        if checkpoint_due(config, index):
            yield commit(Step.CHECKPOINT, None, [trained, selection], state_digest=trained.state_digest)
        if eval_due(config, index):
            shard = eval_shard(config.eval.benchmarks[0], index + 1)
            yield commit(Step.EVAL, shard, [trained], metrics={"heldout": 0.5})


def files_of(run: str, iterations: int, shards: Sequence[str] = TWO, first: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of a run's commits from an iteration on, as a driver writes them."""
    for index, commits in groupby(commits_of(run, iterations, shards, first), lambda commit: commit.iteration):
        shared = []
        for commit in commits:
            if commit.step in SHARED:
                shared.append(commit)
            else:
                yield commit.path, commit.to_bytes()
        for number, begin in enumerate(range(0, len(shared), OF_A_RECORD)):
            path, repeated = layout.record(run, index, number), repeated_from(number) * OF_A_RECORD
            shared[begin : begin + OF_A_RECORD] = [one.within(path) for one in shared[begin : begin + OF_A_RECORD]]
            yield path, record_bytes(shared[begin : begin + OF_A_RECORD], shared[repeated:begin])


def unread_files(run: str, iterations: int) -> Iterator[tuple[str, bytes]]:
    """Yield a file for each of a run's first iterations. A driver that resumes lists their folders and reads none."""
    yield from ((layout.commit(run, index, Step.TRAIN), b"not read") for index in range(iterations))


def write_share(url: str, run: str, iterations: int, shards: Sequence[str], first: int, share: int) -> None:
    """Create every `WRITERS`-th file of a run; those before the iteration `first` cannot be read."""
    store = opened(url)
    files = chain(unread_files(run, first), files_of(run, iterations, shards, first))
    with ThreadPoolExecutor(REQUESTS) as pool:
        mine = (file for number, file in enumerate(files) if number % WRITERS == share)
        list(pool.map(lambda file: store.create(*file), mine))


def write_run(url: str, iterations: int, shards: Sequence[str] = TWO, whole: int | None = None) -> str:
    """Write a run with a manifest, a driver that ended, and its commits; return the run's name.

    `whole`: only the last iterations can be read, so many.
    """
    run, first = f"run-{iterations}", 0 if whole is None else iterations - whole
    ledger = Ledger.create(opened(url), run, config_of(iterations).model_dump(mode="json"))
    lease = ledger.acquire()
    lease.iteration = iterations - 1
    lease.release(Outcome.STOPPED)
    with ProcessPoolExecutor(WRITERS) as pool:
        places = [(url, run, iterations, shards, first, share) for share in range(WRITERS)]
        list(pool.map(write_share, *zip(*places, strict=True)))
    return run


def resume(store: Store, run: str, shards: Sequence[str] = TWO) -> RunContext:
    """Send all requests of a driver until the first step that is not committed. Return the run, which has a lease."""
    ledger = Ledger.open(store, run)
    ledger.acquire()
    config = loader.from_manifest(ledger.manifest.config)
    nothing = cast(Any, None)
    fleet: Any = SimpleNamespace(
        membership=Membership([nothing]),
        generating_environment=lambda engine: ENVIRONMENT,
        training=SimpleNamespace(environment=ENVIRONMENT),
    )
    context = RunContext(
        config,
        ledger,
        fleet=lambda: fleet,
        tokenizer=nothing,
        data=nothing,
        max_prompt_len=1,
        benchmarks={},
        graders={},
        environment=ENVIRONMENT,
        emit=lambda event: None,
    )
    newest = ledger.last_iteration()
    assert newest is not None
    assert newest + 1 == config.rollout.num_rollout - 1
    report_changed_environment(context, newest)
    context.committed(newest - 1, Step.TRAIN)
    last_selection(context, newest - 1)
    for step, shard in [
        *((Step.ROLLOUT, shard) for shard in shards),
        *((Step.REWARD, shard) for shard in shards),
        (Step.FILTER, "00"),
        (Step.ADVANTAGE, None),
        (Step.TRAIN, None),
    ]:
        context.committed(newest, step, shard)
    saved = newest_checkpoint(context.ledger, newest)
    assert newest < 10 or saved is not None
    assert context.find(newest, Step.SYNC) is None
    return context


def release(run: RunContext) -> None:
    """End the driver of a resumed run."""
    assert run.ledger.lease is not None
    run.ledger.lease.release(Outcome.STOPPED)


def go_on(run: RunContext, shards: Sequence[str], first: int, iterations: int) -> None:
    """Commit iterations from `first` on as a driver does: its shards at a time, in records."""

    def commit(one: Commit) -> None:
        fields = {name: getattr(one, name) for name in one.model_fields_set & _GIVEN}
        shared = one.step in SHARED
        with run.ledger.running(one.iteration) if shared else nullcontext():
            attempt = run.ledger.attempt(one.iteration, one.step, one.shard)
            run.commit(**fields, attempt=attempt, started_at=time.time(), shared=shared)

    with ThreadPoolExecutor(len(shards)) as pool:
        made = commits_of(run.ledger.run, first + iterations, shards, first)
        for (_, shared), commits in groupby(made, lambda one: (one.iteration, one.step in SHARED)):
            if shared:
                list(pool.map(commit, commits))
                continue
            for one in commits:
                commit(one)


_GIVEN = {
    *("iteration", "step", "shard", "inputs", "config_digest", "environment", "weight_version_in"),
    *("weight_version_out", "state_digest", "values", "metrics", "timings"),
}


def memory(url: str, run: str, shards: Sequence[str]) -> list[int]:
    """Resume a run and continue it in this process, which does nothing else. Return its resident memory in bytes before
    that, after the resume and after each iteration, and the peak."""
    found = [_status("VmRSS")]
    resumed = resume(opened(url), run, shards)
    found.append(_status("VmRSS"))
    newest = resumed.ledger.last_iteration()
    assert newest is not None
    for index in range(newest + 1, newest + 1 + MORE):
        go_on(resumed, shards, index, 1)
        assert resumed.find(index, Step.TRAIN) is not None
        found.append(_status("VmRSS"))
    release(resumed)
    return [*found, _status("VmHWM")]


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(url: str, work: Callable[[Store], Any]) -> tuple[int, float]:
    """Return the number of requests and the seconds of a piece of work, on a new connection."""
    store = opened(url)
    began = time.perf_counter()
    work(store)
    return getattr(store, "requests", 0), time.perf_counter() - began


def acquire_many(store: Store, run: str, epochs: int) -> None:
    """Change the lease's holder `epochs` times."""
    for _ in range(epochs):
        Lease.acquire(store, run).release(Outcome.STOPPED)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--shards", type=int, default=len(TWO), help="of a round")
    parser.add_argument("--read", type=int, default=1000, help="longest run that is read as a whole")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--store", metavar="URL", help=f"{STORE_HELP}; or a folder")
    arguments = parse(parser, iterations=[12], epochs=3)
    console, found = Console(), []
    shards = [f"00-{part:03d}" for part in range(arguments.shards)]
    table = Table("work", "iterations", "requests", "seconds")

    def note(work: str, iterations: int, cost: tuple[int, float]) -> None:
        requests, seconds = cost
        found.append({"work": work, "iterations": iterations, "requests": requests, "seconds": seconds})
        table.add_row(work, str(iterations), str(requests), f"{seconds:.2f}")

    with bucket(arguments.store) as url:
        for iterations in arguments.iterations:
            began = time.perf_counter()
            run = write_run(url, iterations, shards, None if iterations <= arguments.read else WHOLE)
            console.print(f"{iterations} iterations written in {time.perf_counter() - began:.0f} s")
            resumed: list[RunContext] = []
            cost = measure(url, lambda store, run=run, to=resumed: to.append(resume(store, run, shards)))
            note("resume", iterations, cost)
            release(resumed.pop())
            note("status", iterations, measure(url, lambda store, run=run: run_status(store, run)))
            note("runs", iterations, measure(url, all_runs))
            if iterations <= arguments.read:
                cost = measure(url, lambda store, run=run: list(verify(Ledger.open(store, run))))
                note("verify", iterations, cost)
                note("gc", iterations, measure(url, lambda store, run=run: list(garbage(Ledger.open(store, run)))))
            say("memory")
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                resident = fresh.submit(memory, url, run, shards).result()
            found.append({"work": "memory", "iterations": iterations, "bytes": resident})
            table.add_row("memory, MB", str(iterations), "", ", ".join(f"{size / 1e6:.0f}" for size in resident))
        first = f"run-{arguments.iterations[0]}"
        measure(url, lambda store: acquire_many(store, first, arguments.epochs))
        cost = measure(url, lambda store: Lease.acquire(store, first).release(Outcome.STOPPED))
        note(f"acquire after {arguments.epochs} leases", arguments.iterations[0], cost)
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
