"""Episodes that are struck at random, while their tools change a world outside, from the driver to a tool's process.

| what must hold | of which tools |
|---|---|
| no effect is done twice | all |
| no turn of the policy that was durable is asked for again | all |
| the run ends in the undisturbed state, sample by sample | that take the idempotency key, or offer `reconcile` |
| each call that may have been done and has no answer is named, and its sample failed | that offer neither |

KILLS and SEED in the environment say how many and which; what is at work when it is struck is not the same again.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.layout import CALLS_FILE
from cairn.storage.ledger.snapshots import read_table
from tests.chaos.episodes import TURNS, lines
from tests.chaos.faults import AnyVictim, bear_witness, processes, strike
from tests.chaos.oracle import recommitted
from tests.chaos.runs import DEADLINE, Disturbed, chaos_config
from tests.tiny_run import PROMPTS

KILLS = int(os.environ.get("KILLS", "8"))
GROUPS, SAMPLES = max(24, KILLS // 2), 4
EPISODES = GROUPS * SAMPLES
SEED = int(os.environ.get("SEED", "0"))
ALL: Sequence[AnyVictim] = ("tool", "worker", "driver", "code", "tool", "rollout", "tool", "code")
"""In turn, so that a few kills have them all."""
MOST_BLIND = 12
"""Kills of the run whose tools offer nothing: each fails the groups of what is under way, and others are drawn."""

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900 + 60 * KILLS)]


def run_of(folder: Path, assets: Path, api_url: str, *tools: str) -> Disturbed:
    """A run that is yet to begin, of one rollout of all episodes."""
    world = folder / "world"
    (world / "keys").mkdir(parents=True)
    metadata = {"world": str(world), "tools": tools}
    rows = [{"prompt": prompt, "label": "1", "metadata": metadata} for prompt in PROMPTS]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = chaos_config(assets).model_dump(mode="json")
    config["data"] |= {"path": str(folder / "data.jsonl")}
    config["rollout"] |= {
        "num_rollout": 1,
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": SAMPLES,
        "num_engines": 1,
        "num_episode_workers": 2,
        "custom_generate_function_path": "tests.chaos.episodes.generate",
        "max_refill_rounds": 20,
    }
    config["eval"] |= {"eval_interval": None, "benchmarks": []}
    config["training"] |= {"num_steps_per_rollout": 1}
    config["retry"] |= {"retries": 20}
    file = folder / "config.json"
    file.write_text(RunConfig.model_validate(config).model_dump_json())
    return Disturbed(folder, file, {"PREFECT_API_URL": api_url}, warm=True)


def effects(run: Disturbed) -> Counter[str]:
    """How often each was done."""
    done = Counter(str(line["what"]) for line in lines(run.folder / "world" / "effects"))
    keys = (file.name.split("-") for file in (run.folder / "world" / "keys").iterdir())
    return done + Counter("/".join(words[:3]) for words in keys)


def struck_at_random(run: Disturbed, victims: Sequence[AnyVictim], dice: random.Random, kills: int) -> None:
    """Drive a run to its end; strike it so often, each time when so many more effects have been done."""
    points = sorted(dice.sample(range(EPISODES * TURNS * 9 // 10), kills))
    waiting = [(point, victims[turn % len(victims)]) for turn, point in enumerate(points)]
    for _ in range(kills + 1):
        driver = run.start()
        end = time.monotonic() + DEADLINE
        while driver.poll() is None and time.monotonic() < end:
            if waiting and effects(run).total() >= waiting[0][0]:
                _, victim = waiting[0]
                with_it = processes(psutil.Process(driver.pid), victim)
                if with_it:
                    (*_, chosen) = with_it
                    strike(victim, [chosen], run.prefect_home)
                    bear_witness(run.witness, [chosen], victim=victim)
                    waiting.pop(0)
                    if victim == "driver":
                        driver.wait(60)
            time.sleep(0.01)
        run.exits.append(driver.wait(1))
        if run.exits[-1] == 0:
            break
    assert run.exits[-1] == 0, run.log()
    assert [account["victim"] for account in run.struck()] == [victims[turn % len(victims)] for turn in range(kills)]


def samples(run: Disturbed) -> dict[tuple[int, int], tuple[list[int], str | None]]:
    """The response and the error of every episode that was committed."""
    found = {}
    for commit in run.commits():
        if commit.step is Step.ROLLOUT:
            output = next(one for one in commit.outputs if one.path.endswith("samples.parquet"))
            for row in read_table(run.ledger().store, commit.run, output).to_pylist():
                found[row["group_id"], row["sample_index"]] = row["response_ids"], row["error"]
    return found


def resampled(run: Disturbed) -> list[str]:
    """Return turns that the policy sampled although they were durable."""
    durable: dict[tuple[int, int, str], float] = {}
    for line in lines(run.folder / "calls.jsonl"):
        for call in line["calls"]:
            durable.setdefault(tuple(call), line["at"])
    requested = lines(run.folder / "world" / "asked")
    assert durable
    assert requested
    return [str(line) for line in requested if line["at"] > durable.get(tuple(line["call"]), time.time())]


def orphans(run: Disturbed) -> dict[tuple[int, int], tuple[str, str]]:
    """Of each sample the call of a tool, and its arguments, whose intent was durable and whose answer never was."""
    noted = lines(run.folder / "calls.jsonl")
    answered = {tuple(call) for line in noted for call in line["answered"]}
    intended = {tuple(call): arguments for line in noted for *call, arguments in line["intended"]}
    found = {
        (*sample, call): arguments for (*sample, call), arguments in intended.items() if (*sample, call) not in answered
    }
    assert len({key[:2] for key in found}) == len(found), "a sample fails with its first"
    return {(group, sample): (call, arguments) for (group, sample, call), arguments in found.items()}


def committed_orphans(run: Disturbed) -> dict[tuple[int, int], tuple[str, str]]:
    """The same, as the commits have it."""
    found = {}
    for commit in run.commits():
        for output in commit.outputs:
            if commit.step is Step.ROLLOUT and output.path.endswith(CALLS_FILE):
                for row in read_table(run.ledger().store, commit.run, output).to_pylist():
                    if row["order"] is None:
                        found[row["group_id"], row["sample_index"]] = row["call"], row["arguments"]
    return found


def assert_nothing_twice(run: Disturbed) -> None:
    assert [what for what, times in effects(run).items() if times > 1] == []
    assert resampled(run) == []
    assert recommitted(run) == []
    assert not run.left_behind()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path, api_url: str) -> Disturbed:
    run = run_of(tmp_path_factory.mktemp("whole"), tiny_assets, api_url, "keyed", "traceable")
    assert run.drive() == 0, run.log()
    assert effects(run).total() == EPISODES * TURNS
    return run


def test_what_can_be_looked_up_or_has_a_key_is_done_once_and_the_run_ends_in_the_undisturbed_state(
    whole: Disturbed, tiny_assets: Path, tmp_path: Path, api_url: str
) -> None:
    run = run_of(tmp_path, tiny_assets, api_url, "keyed", "traceable")
    try:
        struck_at_random(run, ALL, random.Random(SEED), KILLS)
        assert_nothing_twice(run)
        assert effects(run) == effects(whole)
        assert samples(run) == samples(whole)
        assert len(samples(run)) == EPISODES
        assert run.state_digests() == whole.state_digests()
    finally:
        run.kill_what_is_left()


def test_each_call_that_can_neither_be_looked_up_nor_has_a_key_is_named_and_its_sample_fails(
    tiny_assets: Path, tmp_path: Path, api_url: str
) -> None:
    run = run_of(tmp_path, tiny_assets, api_url, "blind")
    try:
        kills = min(max(4, KILLS // 2), MOST_BLIND)
        struck_at_random(run, ("tool", "worker", "driver", "code"), random.Random(SEED), kills)
        assert_nothing_twice(run)
        uncertain, found = orphans(run), samples(run)
        assert uncertain
        assert committed_orphans(run) == uncertain
        for sample, (call, arguments) in uncertain.items():
            message = f"call {call} (tool blind) with {arguments} was under way when its process was lost, and may have"
            assert message in (found[sample][1] or ""), "each is named, by its own sample"
        failed = {group for group, _ in uncertain}
        assert {sample[0] for sample, (_, error) in found.items() if error is not None} == failed, "and no other fails"
        done, turns = effects(run), {key: int(call[1:]) for key, (call, _) in uncertain.items()}
        for (group, sample), (_, error) in found.items():
            made = [turn for turn in range(TURNS) if done[f"{group}/{sample}/{turn}"]]
            if (group, sample) in turns:
                assert [*range(turns[group, sample])] == made[: turns[group, sample]], "what is named is the last"
                assert len(made) <= turns[group, sample] + 1
            else:
                assert error is not None or made == [*range(TURNS)], "what is trained on had all its effects"
    finally:
        run.kill_what_is_left()
