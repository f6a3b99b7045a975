"""Two drivers that are taken over one after the other, of which the first is only suspended: it writes on how its
episodes ended, while the second one is at them, and then the second dies. What the third commits is one history of each
sample: its tokens are those of its recorded calls, whoever made them.

Gates, which are files, say when the tools of a driver answer, so that each driver stands where it is to stand.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.trajectories import CallKind
from cairn.storage.ledger import snapshots as tables
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.layout import attempt_epoch
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.generation.calls import by_sample, read_calls
from cairn.tasks.generation.groups import row_segments
from tests.chaos.in_process import drive
from tests.forks import FORKS
from tests.tiny_run import tiny_config, tiny_context
from tests.waiting import wait_for

AGENT = '''
import asyncio, os, secrets
from pathlib import Path

import cairn

HERE, DRIVER = Path(__file__).parent, os.environ["CHAOS_DRIVER"]


async def gate(sample, turn):
    """A driver's last turns are held back, and of the second one also all of odd samples."""
    held = {"1": turn > 0, "2": turn > 1 or (turn > 0 and sample % 2)}.get(DRIVER, False)
    while held and not (HERE / f"open-{DRIVER}").exists():
        await asyncio.sleep(0.02)


@cairn.tool(kind="pure", timeout=100)
async def look(sample: int, turn: int) -> str:
    """Digits that nobody is given twice, behind the driver's."""
    await gate(sample, turn)
    return DRIVER + "".join(secrets.choice("0123456789") for _ in range(5))


def done(intent):
    return "paid" if (HERE / "paid").exists() and intent.key in (HERE / "paid").read_text().split() else cairn.NOT_DONE


@cairn.tool(kind="effects", timeout=100, reconcile=done)
async def pay(sample: int, turn: int, idempotency_key: str) -> str:
    await gate(sample, turn)
    with (HERE / "paid").open("a") as file:
        file.write(f"{idempotency_key}\\n")
    return "paid"


async def generate(ctx, sample):
    ids, segments = [*sample.prompt_ids], []
    for turn in range(3):
        said = await ctx.sample(ids, max_new_tokens=3)
        seen = await ctx.call(look, {"sample": sample.index, "turn": turn})
        if EFFECTS:
            await ctx.call(pay, {"sample": sample.index, "turn": turn})
        given = cairn.Segment.given(ctx.tokenizer.encode(seen, add_special_tokens=False))
        segments += [said, given]
        ids += [*said.ids, *given.ids]
    return cairn.Trajectory([*segments, await ctx.sample(ids, max_new_tokens=3)])
'''
GROUPS, SAMPLES = 2, 4
PIPELINES: dict[str, dict[str, Any]] = {
    "sync": {"num_rollout": 1},
    "lagged": {"num_rollout": 2, "pipeline": "lagged"},
    "streaming": {"num_rollout": 2, "pipeline": "streaming", "max_age": 1},
}


def configured(assets: Path, folder: Path, pipeline: str, effects: bool) -> RunConfig:
    (folder / "agent.py").write_text(AGENT.replace("EFFECTS", str(effects)))
    rollout = {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": 40,
        "custom_generate_function_path": f"{folder / 'agent.py'}:generate",
    }
    return tiny_config(assets, rollout={**rollout, **PIPELINES[pipeline]})


def drive_as(number: str, store: str, config: RunConfig) -> None:
    os.environ["CHAOS_DRIVER"] = number
    with tiny_context(store, config) as (run, _):
        drive(run)


def answered(store: Path, epoch: int) -> int:
    """Tools' answers that a driver has recorded."""
    logs = [path for path in store.rglob("write_ahead/calls/*.arrow") if attempt_epoch(path.parts[-4]) == epoch]
    rows = [row for path in logs for row in tables.from_ipc(path.read_bytes()).to_pylist()]
    return sum(row["kind"] == "tool" and row["order"] is not None for row in rows)


def ended(store: Path, epoch: int) -> int:
    """Samples that a driver has recorded as ended."""
    logs = [path for path in store.rglob("write_ahead/*.arrow") if attempt_epoch(path.parts[-3]) == epoch]
    return sum(tables.from_ipc(path.read_bytes()).num_rows for path in logs)


def mixed(run: RunContext, iterations: int) -> list[tuple[int, int]]:
    """Samples whose tokens from the world are not what their recorded calls gave."""
    found = []
    for index in range(iterations):
        for commit in (one for one in run.ledger.commits(index) if one.step is Step.ROLLOUT):
            rows = run.read(commit).to_pylist()
            calls, results = run.calls(commit) or (None, None)
            assert calls is not None
            segments = {(row["group_id"], row["sample_index"]): row_segments(row) for row in rows}
            records = by_sample(read_calls(calls, results, segments))
            for key, own in segments.items():
                tokens = [one.ids.tolist() for one in own if one.call is None]
                seen = [one.result for one in records[key] if one.kind is CallKind.TOOL and one.name == "look"]
                expected = [run.tokenizer.encode(json.loads(one or '""'), add_special_tokens=False) for one in seen]
                if tokens != expected:
                    found.append(key)
    return found


@pytest.mark.parametrize("effects", [False, pytest.param(True, marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    "pipeline", ["sync", *(pytest.param(name, marks=pytest.mark.proof) for name in list(PIPELINES)[1:])]
)
def test_what_is_committed_is_one_history(pipeline: str, effects: bool, tiny_assets: Path, tmp_path: Path) -> None:
    config, store = configured(tiny_assets, tmp_path, pipeline, effects), tmp_path / "store"
    first, second = (FORKS.Process(target=drive_as, args=(str(n), str(store), config)) for n in (1, 2))
    try:
        first.start()
        wait_for(lambda: answered(store, 1) >= GROUPS * SAMPLES * (1 + effects), 100)
        second.start()  # it makes its own second turns of half of the samples
        wait_for(lambda: answered(store, 2) >= GROUPS * SAMPLES / 2, 100)
        # Where it acts, it learns at its next intent that another one is at it, and what it looks up before is late.
        late, enough = (answered, GROUPS * SAMPLES) if effects else (ended, GROUPS * SAMPLES / 2)
        before = late(store, 1)
        (tmp_path / "open-1").touch()
        # Its first intent may come before its other answers are recorded: then it has ended with fewer.
        wait_for(lambda: late(store, 1) >= before + enough or not first.is_alive(), 100)
    finally:
        for driver in (second, first):
            if driver.is_alive():
                driver.kill()
                driver.join(60)
    os.environ["CHAOS_DRIVER"] = "3"
    with tiny_context(str(store), config) as (run, _):
        drive(run)
        assert mixed(run, config.rollout.num_rollout) == []
        assert not [finding for one in verify(run.ledger) for finding in one.findings]
    keys = Counter((tmp_path / "paid").read_text().split() if effects else [])
    assert set(keys.values()) <= {1}
