"""Load of a driver at scale: its CPU time and memory, requests to the store, and calls of actors, an iteration.

    python -m bench.scale --tokens [--samples 512] [--length 32768] [--routing LAYERS,TOP_K] [--score]
    python -m bench.scale --shards [--shards-per-round 256] [--engines 64] [--iterations 4]
    python -m bench.scale --rollout|--evaluation [--samples 1024] [--routing LAYERS,TOP_K]
    python -m bench.scale --tokens --against PATH        the same with the code of another checkout, in turn
    options: --store local|moto|ceph|s3://… --ranks 1 --keep FOLDER --smoke --json FILE

The engines are synthetic: a rollout engine answers at once with random tokens, and the training engine hashes its rows
of the batch (bench/synthetic_engines.py). Everything else is real: the driver with Prefect's server, Ray's actors, the
graders' processes, the ledger and the store. So this measures everything but engines. The tokens are random, which
compress worse than text.

  --tokens   few shards and long responses: what grows with tokens. Also given per million tokens.
  --shards   many shards and engines, and short responses: what grows with shards. The driver is killed after the last
             iteration, and another one resumes the run.
  --rollout  the rollout steps of one iteration alone, without Prefect: the driver while engines generate.
             --evaluation measures a benchmark of as many samples instead, graded by the same function.

Each iteration is measured from the end of the one before. CPU seconds and memory are those of the driver's process;
what its children take is in the JSON file. A step's CPU seconds are those of the whole driver between the first start
and the last end of its shards, so steps that overlap count twice. Requests are HTTP requests of all processes; on local
files, what an object store would need for the same calls. "Private memory" leaves out pages of Ray's object store.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import store_counts, synthetic_engines
from bench.command import parse, say
from bench.gateway import bucket
from tests.s3 import moto_server

HERE = Path(__file__).parents[1]
ROOMS = ("configs", "storage", "engines", "tasks", "flows")
DEADLINE = 3600
"""Seconds that one driver may take."""
GROUP = 8
PROMPTS = 4096
CONTEXT = 2**22
"""Tokens that the model folder permits."""

GRADER = """
def grade(response, label, metadata):
    return float(sum(map(ord, response[-8:])) % 2)
"""


def write_assets(folder: Path) -> None:
    """Write a model folder, of which only tokenizer and config are read, prompts and a grader."""
    from examples.quickstart.model import build_model, build_tokenizer

    texts = [f"Question {number}: sort the digits of {number * number} in increasing order." for number in range(99)]
    tokenizer = build_tokenizer(texts)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    rows = ({"prompt": texts[number % len(texts)], "label": str(number)} for number in range(PROMPTS))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grader.py").write_text(GRADER)


def config_of(arguments: argparse.Namespace, assets: Path) -> dict[str, Any]:
    """Return the options of the run."""
    groups = arguments.samples // arguments.group
    return {
        "model": {"path": str(assets / "model")},
        "data": {"path": str(assets / "train.jsonl")},
        "rollout": {
            # An iteration more than are executed: a run that is complete cannot be resumed.
            "num_rollout": arguments.iterations + (1 if arguments.shards else 0),
            "rollout_batch_size": groups,
            "n_samples_per_prompt": arguments.group,
            "rollout_max_response_len": arguments.length,
            "num_engines": arguments.engines,
            "shards_per_round": arguments.shards_per_round,
        },
        "reward": {"custom_rm_path": f"{assets / 'grader.py'}:grade"},
        "algorithm": {
            "use_rollout_logprobs": not arguments.score,
            "use_rollout_routing_replay": arguments.routing is not None,
        },
        "training": {
            "num_threads": 1,
            "world_size": arguments.ranks,
            "num_steps_per_rollout": 2 if arguments.score else 1,
        },
        "tracking": {"tensorboard_dir": None},
    }


@contextmanager
def store_at(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of an empty store, and environment variables for it."""
    if kind == "local":
        yield str(folder / "store"), {}
    elif kind == "moto":
        with moto_server() as server:
            yield f"s3://{server.new_bucket()}/scale", server.env
    elif kind == "ceph":
        with bucket(None) as url:
            yield url, {}
    else:
        yield kind, {}


@contextmanager
def search_path(checkout: Path = HERE) -> Iterator[str]:
    """Yield a folder for PYTHONPATH with this checkout's `bench`, the counting of requests, and the code of `checkout`
    under the names by which it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench").symlink_to(HERE / "bench")
        (Path(folder) / "sitecustomize.py").symlink_to(Path(store_counts.__file__))
        package = Path(folder) / "cairn"
        package.mkdir()
        for part in (*(checkout / "cairn").iterdir(), *(checkout / room for room in ROOMS)):
            (package / part.name).symlink_to(part)
        yield folder


def drive(checkout: Path, folder: Path, url: str, environment: dict[str, str], **options: Any) -> dict[str, Any]:
    """Run one driver with the code of a checkout, and return its measurements."""
    results = folder / "found.json"
    counts = folder / f"counts-{len(list(folder.glob('counts-*')))}"
    counts.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "RAY_ADDRESS")}
    with search_path(checkout) as path:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.scale_driver",
             json.dumps({"results": str(results), "store": url, **options})],
            env={**inherited, **environment, "PYTHONPATH": path, store_counts.FOLDER: str(counts),
                 "PREFECT_HOME": str(folder / "prefect")},
            cwd=folder, stdout=sys.stderr, timeout=DEADLINE, check=False,
        )  # fmt: skip
    killed = options.get("resume") or options.get("end_after") is not None
    if done.returncode != (9 if killed else 0):
        raise SystemExit(f"the driver ended with {done.returncode}; its messages stand above")
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def measure(arguments: argparse.Namespace, checkout: Path) -> dict[str, Any]:
    """Return the measurements of one run, and of the driver that resumes it."""
    with ExitStack() as stack:
        kept = arguments.keep / checkout.name if arguments.keep is not None else None
        if kept is not None:
            kept.mkdir(parents=True)
        # Pages that are written must reach a disk: /tmp may be memory.
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=arguments.scratch)
        folder = Path(stack.enter_context(nullcontext(str(kept)) if kept is not None else temporary))
        write_assets(folder)
        url, environment = stack.enter_context(store_at(arguments.store, folder))
        if arguments.routing is not None:
            environment = environment | {synthetic_engines.ROUTES: arguments.routing}
        config = config_of(arguments, folder)
        found: dict[str, Any] = {"checkout": str(checkout), "commit": revision(checkout)}
        end_after = arguments.iterations if arguments.shards else None
        if arguments.alone == "evaluation":
            rows = f"{folder / 'train.jsonl'}@[0:{arguments.samples // arguments.group}]"
            lengths = {"n_samples_per_eval_prompt": arguments.group, "max_response_len": arguments.length}
            config["eval"] = {"eval_interval": 1, "benchmarks": [{"name": "heldout", "path": rows, **lengths}]}
        wanted = {"config": config, "end_after": end_after, "alone": arguments.alone}
        found["run"] = drive(checkout, folder, url, environment, **wanted)
        if arguments.shards:
            say("the driver was killed; another one resumes")
            found["resumed"] = drive(checkout, folder, url, environment, config=config, resume=True)
    return found


def revision(checkout: Path) -> str:
    """Return the commit of a checkout, with a `+` where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def summary(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    """Return the figures of an iteration: medians over the iterations after the first, which has no predecessor to
    resume from and warms up. Where there is only one, that one."""
    iterations = found["run"]["iterations"]
    own = iterations[1:] or iterations
    tokens = arguments.samples * arguments.length / 1e6

    def median(value: Any) -> float:
        return float(statistics.median(value(one) for one in own))

    def requests(one: dict[str, Any], *words: str) -> int:
        return sum(count for name, count in one["requests"].items() if all(word in name for word in words))

    made = {
        "wall seconds": median(lambda one: one["wall"]),
        "driver CPU seconds": median(lambda one: one["cpu"].get("driver", 0.0)),
        "CPU seconds of all processes": median(lambda one: sum(one["cpu"].values())),
        "peak resident MB": max(one["peak"]["resident"] for one in own) / 1e6,
        "peak private MB": max(one["peak"]["private"] for one in own) / 1e6,
        "requests": median(lambda one: requests(one)),
        "  of the driver": median(lambda one: requests(one, "driver ")),
        **{
            f"  {kind}": median(lambda one, kind=kind: requests(one, kind))
            for kind in sorted({name.split(" ", 1)[1] for one in own for name in one["requests"]})
        },
        "MB written": median(lambda one: sum(one["written"].values())) / 1e6,
        "  by the driver": median(lambda one: one["written"].get("driver", 0)) / 1e6,
        "calls of actors": median(lambda one: sum(one["calls"].values())),
        **{
            f"  {step}: driver CPU seconds": median(lambda one, step=step: one["steps"].get(step, {"cpu": 0})["cpu"])
            for step in dict.fromkeys(step for one in own for step in one["steps"])
        },
        "driver CPU seconds a million tokens": median(lambda one: one["cpu"].get("driver", 0.0)) / tokens,
        "peak private MB a million tokens": max(one["peak"]["private"] for one in own) / 1e6 / tokens,
        "bytes written a token": median(lambda one: sum(one["written"].values())) / tokens / 1e6,
    }
    if len(own) > 2:
        grown = own[-1]["private_after"] - own[0]["private_after"]
        made["memory growth an iteration, MB"] = grown / 1e6 / (len(own) - 1)
    if "resumed" in found:
        resumed = found["resumed"]["to_first_step"]
        made |= {
            "resume: requests of the driver": requests(resumed, "driver "),
            "resume: seconds": resumed["wall"],
            "  without waits for Ray and Prefect": resumed["wall"] - resumed["waited"],
            "resume: driver CPU seconds": resumed["cpu"].get("driver", 0.0),
        }
    return made


def shown(found: list[dict[str, Any]]) -> Table:
    """Return the summaries side by side."""
    table = Table("an iteration", *(f"{Path(one['checkout']).name} {one['commit']}" for one in found))
    for name in dict.fromkeys(name for one in found for name in one["summary"]):
        values = [one["summary"].get(name) for one in found]
        table.add_row(name, *("" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".") for value in values))
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--tokens", action="store_true", help="long responses (the default)")
    preset.add_argument("--shards", action="store_true", help="many shards and engines, then a resume")
    for step in ("rollout", "evaluation"):
        preset.add_argument(
            f"--{step}", dest="alone", action="store_const", const=step, help=f"long responses of one {step} alone"
        )
    parser.add_argument("--samples", type=int, help="samples an iteration")
    parser.add_argument("--group", type=int, help="samples a prompt")
    parser.add_argument("--length", type=int, help="tokens of each response")
    parser.add_argument("--shards-per-round", type=int, help="shards of an iteration")
    parser.add_argument("--engines", type=int, help="rollout engines")
    parser.add_argument("--ranks", type=int, default=1, help="training ranks")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--routing", metavar="LAYERS,TOP_K", help="record the experts of each token: routing replay")
    parser.add_argument("--score", action="store_true", help="with a score step, which returns log-probs")
    parser.add_argument("--store", default="local", help="local, moto, ceph (a gateway on this machine) or s3://…")
    parser.add_argument("--scratch", type=Path, help="folder for the run's temporary files")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run's files here")
    parser.add_argument("--against", type=Path, metavar="PATH", help="measure the code of another checkout too")
    arguments = parse(
        parser, samples=8, group=2, length=64, shards_per_round=2, engines=2, iterations=2,
    )  # fmt: skip
    wanted = (
        {"samples": 512, "group": 2, "length": 16, "shards_per_round": 256, "engines": 64, "iterations": 4}
        if arguments.shards
        else {"samples": 512, "group": GROUP, "length": 32_768, "shards_per_round": 8, "engines": 2, "iterations": 2}
        | ({"samples": 1024, "iterations": 1} if arguments.alone else {})
    )
    for name, value in wanted.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if shutil.disk_usage(arguments.scratch or tempfile.gettempdir()).free < 20 * arguments.samples * arguments.length:
        raise SystemExit("there is too little room for the run's files: give another --scratch, or fewer --samples")
    checkouts = [*([arguments.against.resolve()] if arguments.against else []), HERE]
    found = []
    for checkout in checkouts:
        say(f"{checkout}")
        one = measure(arguments, checkout)
        found.append(one | {"summary": summary(one, arguments)})
    Console(width=120).print(shown(found))
    if arguments.json is not None:
        parameters = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"parameters": parameters, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
