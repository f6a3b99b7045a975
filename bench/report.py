"""Cost of a report of a long run: seconds to write it, its size, and how soon a browser displays it.

    python -m bench.report [--samples 100000] [--tokens 200] [--smoke] [--json FILE]

Writes a run of a thousand samples an iteration, eight a group, as a driver writes it, but without weights: responses
from the quickstart's vocabulary with random log-probs, lengths log-normal around `--tokens`. Then measures `cairn
report` of it, in a separate process, and the page in headless Chromium:

  curves      from opening the file until the last curve is drawn
  ready       until every sample can be read, searched and filtered
  search      for words that are in few responses, through all of them
  sort        of all rows by reward
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.command import parse, say
from cairn.configs import loader
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, FILTER, REWARD, ROLLOUT
from cairn.storage.opening import open_store
from cairn.storage.records import Environment
from cairn.tasks.steps import rules
from examples.quickstart.model import COMMON_WORDS, build_tokenizer
from tests.browser import executable

ENVIRONMENT = Environment(device="cpu", threads=1, host="box", versions={"python": "3.11", "torch": "2.13"})
GROUPS, SIZE = 125, 8
SENTENCES = 4000
RARE = "albatross"


class Writer:
    """Writes iterations of a run that was never trained."""

    def __init__(self, folder: Path, iterations: int, tokens: int) -> None:
        self.chance = np.random.default_rng(0)
        self.tokens = tokens
        tokenizer = build_tokenizer([])
        tokenizer.save_pretrained(folder / "model")
        words = COMMON_WORDS.split()
        drawn = [" ".join(self.chance.choice(words, 12)) + ". " for _ in range(SENTENCES)]
        drawn[0] = f"{RARE} {drawn[0]}"
        self.sentences = [(text, tokenizer(text)["input_ids"]) for text in drawn]
        config = loader.parse(
            {
                "model": {"path": str(folder / "model")},
                "data": {"path": "train.jsonl"},
                "rollout": {
                    "num_rollout": iterations,
                    "rollout_batch_size": GROUPS,
                    "n_samples_per_prompt": SIZE,
                    "rollout_max_response_len": 20 * tokens,
                },
            }
        )
        self.ledger = Ledger.create(open_store(str(folder)), "long", config, {"data": "0" * 64}, rules=rules(config))
        self.ledger.acquire()

    def iteration(self, number: int) -> None:
        """Write rollout, reward, filter, advantage and train."""
        n = GROUPS * SIZE
        groups = np.repeat(np.arange(GROUPS) + number * GROUPS, SIZE)
        keys = {"group_id": groups, "sample_index": np.tile(np.arange(SIZE), GROUPS)}
        lengths = self.chance.lognormal(np.log(self.tokens), 0.6, n)
        responses = [self._response(length) for length in lengths]
        ids = [response[1] for response in responses]
        rewards = (self.chance.random(n) < 0.2 + 0.6 * number / max(1, number + 30)).astype(np.float32)
        samples = {
            **keys,
            "rollout_id": np.arange(n) + number * n,
            "prompt_index": groups,
            "epoch": np.zeros(n, int),
            "prompt_text": [f"{self.sentences[group % SENTENCES][0]} Question {group}?" for group in groups],
            "prompt_ids": [self.sentences[group % SENTENCES][1] for group in groups],
            "response_text": [response[0] for response in responses],
            "response_ids": ids,
            "segments": [None] * n,
            "log_probs": [-self.chance.exponential(0.4, len(one)) for one in ids],
            "loss_mask": [[1] * len(one) for one in ids],
            "weight_versions": [[number] * len(one) for one in ids],
            "finish_reason": ["stop"] * n,
            "status": ["completed"] * n,
            "error": [None] * n,
            "seed": groups,
            "engine": ["rollout-0"] * n,
            "seconds": lengths / 100,
            "cached_tokens": np.zeros(n, int),
            "label": [str(group) for group in groups],
            "metadata": [None] * n,
        }
        graded = {
            **keys,
            "reward": rewards,
            "components": [None] * n,
            "grader": ["exact_match"] * n,
            "grader_version": ["1"] * n,
            "status": ["completed"] * n,
            "error": [None] * n,
        }
        judged = {
            "group_id": groups[::SIZE],
            "iteration": np.full(GROUPS, number),
            "shard": ["00-000"] * GROUPS,
            "kept": np.ones(GROUPS, bool),
            "disposition": ["train"] * GROUPS,
            "reason": [None] * GROUPS,
            "mean_reward": rewards.reshape(GROUPS, SIZE).mean(1),
            "std_reward": rewards.reshape(GROUPS, SIZE).std(1),
            "age": np.zeros(GROUPS, int),
            "max_age": [None] * GROUPS,
        }
        weighed = {
            **keys,
            "reward": rewards,
            "advantages": [np.full(len(one), reward - 0.5) for one, reward in zip(ids, rewards, strict=True)],
            "returns": [np.full(len(one), reward - 0.5) for one, reward in zip(ids, rewards, strict=True)],
            "ages": [[0] * len(one) for one in ids],
        }
        tokens = sum(map(len, ids))
        rollout = self._commit(
            number, Step.ROLLOUT, "00-000", [], _table(samples, ROLLOUT),
            metrics={
                "samples": n, "response_tokens": tokens, "prompt_tokens": 40 * n,
                "generated_groups": GROUPS, "recovered_groups": 0,
            },
            values={"cursor": GROUPS * (number + 1)},
        )  # fmt: skip
        reward = self._commit(number, Step.REWARD, "00-000", [rollout], _table(graded, REWARD))
        selection = self._commit(
            number, Step.FILTER, "00", [rollout, reward], _table(judged, FILTER),
            metrics={"raw_reward": float(rewards.mean()), "response_len/mean": tokens / n},
            values={"full": True, "cursor": GROUPS * (number + 1), "buffered": 0},
        )  # fmt: skip
        advantage = self._commit(
            number, Step.ADVANTAGE, None, [selection, rollout, reward], _table(weighed, ADVANTAGE),
            metrics={"raw_reward": float(rewards.mean())},
        )  # fmt: skip
        self._commit(
            number, Step.TRAIN, None, [advantage, rollout], None,
            weight_version_in=number, weight_version_out=number + 1, state_digest=f"{number + 1:064x}",
            metrics={"loss": 0.1, "entropy_loss": 1 / (number + 1), "grad_norm": 1.0, "ppo_kl": 1e-4},
        )  # fmt: skip

    def _response(self, length: float) -> tuple[str, list[int]]:
        text, ids = [], list[int]()
        while len(ids) < length:
            sentence = self.sentences[self.chance.integers(SENTENCES)]
            text.append(sentence[0])
            ids += sentence[1]
        return "".join(text), ids

    def _commit(
        self, number: int, step: Step, shard: str | None, inputs: list[Commit], table: pa.Table | None, **fields: Any
    ) -> Commit:
        attempt = self.ledger.attempt(number, step, shard)
        return self.ledger.commit(
            iteration=number,
            step=step,
            shard=shard,
            attempt=attempt,
            inputs={commit.name: commit.digest for commit in inputs},
            config_digest="0" * 64,
            environment=ENVIRONMENT,
            started_at=time.time() - 1,
            outputs=() if table is None else (attempt.write_table("rows.parquet", table),),
            **fields,
        )


def _table(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def write_run(folder: Path, samples: int, tokens: int) -> None:
    """Write a run of about `samples` samples."""
    iterations = max(1, samples // (GROUPS * SIZE))
    writer = Writer(folder, iterations, tokens)
    for number in range(iterations):
        writer.iteration(number)
        if (number + 1) % 10 == 0:
            say(f"{number + 1} of {iterations} iterations written")
    assert writer.ledger.lease is not None
    writer.ledger.lease.release(Outcome.COMPLETED)


def report(folder: Path, *options: str) -> tuple[float, int]:
    """Return the seconds of `cairn report` and its peak memory in bytes."""
    command = [
        sys.executable,
        "-c",
        "from cairn.flows.cli import app; app()",
        "report",
        "long",
        str(folder / "long.html"),
    ]
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--store", str(folder), "--json", *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"cairn report ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def browse(file: Path) -> dict[str, float]:
    """Return the seconds in a browser, see the module, and its memory in bytes."""
    from playwright.sync_api import sync_playwright

    program, environment = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], env={**os.environ, **environment}, timeout=60_000
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        began = time.perf_counter()
        page.goto(file.as_uri(), wait_until="commit")
        page.locator("#curves figure canvas").first.wait_for()
        curves = time.perf_counter() - began
        page.locator("html[data-state=ready]").wait_for(state="attached")
        ready = time.perf_counter() - began
        count = page.locator("#sample-count")
        whole = count.inner_text()
        began = time.perf_counter()
        page.locator("#sample-search").fill(RARE)
        page.wait_for_timeout(1)
        while count.inner_text() == whole:
            page.wait_for_timeout(5)
        search = time.perf_counter() - began
        page.get_by_role("button", name="Clear").click()
        while count.inner_text() != whole:
            page.wait_for_timeout(5)
        began = time.perf_counter()
        page.locator(".tabulator-col[tabulator-field=reward] .tabulator-col-title").click()
        page.locator(".tabulator-col[tabulator-field=reward]:not([aria-sort=none])").wait_for()
        sort = time.perf_counter() - began
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
    return {"curves": curves, "ready": ready, "search": search, "sort": sort, "heap_bytes": heap}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200, help="of a response, the median")
    options = parse(parser, samples=2000, tokens=20)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_run(folder, options.samples, options.tokens)
        seconds, memory = report(folder)
        quick, _ = report(folder, "--no-verify")
        size = (folder / "long.html").stat().st_size
        say("written; opening it")
        found = {
            "samples": options.samples,
            "seconds_to_write": seconds,
            "seconds_without_verification": quick,
            "peak_memory_bytes": memory,
            "bytes": size,
            **browse(folder / "long.html"),
        }
    print(
        f"{options.samples:,} samples: written in {seconds:.1f} s ({quick:.1f} s without verification, "
        f"{memory / 1e9:.1f} GB of memory), {size / 1e6:.1f} MB; in the browser curves after {found['curves']:.1f} s, "
        f"all samples after {found['ready']:.1f} s, search {found['search']:.1f} s, sort {found['sort']:.1f} s, "
        f"{found['heap_bytes'] / 1e6:.0f} MB of JavaScript's memory"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
