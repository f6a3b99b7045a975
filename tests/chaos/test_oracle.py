"""The oracle of the chaos runs finds what it is there to find."""

import json
from pathlib import Path

import pytest

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.chaos import oracle
from tests.chaos.runs import Disturbed
from tests.chaos.tally import Tallied, add, read, section
from tests.storage.builders import commit_step
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.fixture
def run(tmp_path: Path) -> Disturbed:
    return Disturbed(tmp_path, tmp_path / "config.json", {}, exits=[0], name="tiny")


def test_a_step_that_two_drivers_committed_is_found(run: Disturbed) -> None:
    ledger = Ledger.create(open_store(run.store_url), run.name, {})
    ledger.acquire()
    commit = commit_step(ledger, 0, Step.TRAIN)
    assert oracle.recommitted(run) == ["its drivers have noted no commits"]
    noted = run.folder / "committed.jsonl"
    noted.write_text(json.dumps([commit.name, commit.digest]) + "\n")
    assert oracle.recommitted(run) == []
    noted.write_text(noted.read_text() + json.dumps([commit.name, "0" * 64]) + "\n")
    assert oracle.recommitted(run) == [
        "committed more than once: ['000000/train']",
        f"committed, and not so in the ledger: [('000000/train', '{'0' * 64}')]",
    ]


def test_what_is_generated_twice_what_gc_leaves_and_what_training_makes_otherwise_is_found(
    tiny_assets: Path, run: Disturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2})
    with tiny_context(run.store_url, config) as (context, _):
        iteration(context, DirectSteps(context), 0)
        rows = context.read(context.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
        samples = [(row["group_id"], row["sample_index"]) for row in rows]
    place = {"iteration": 0, "shard": "00-000"}
    notes = [{**place, "asked": samples}, {**place, "finished": samples[:2]}, {**place, "asked": samples[2:3]}]

    def noted(*more: object) -> None:
        (run.folder / "generated.jsonl").write_text("".join(json.dumps(note) + "\n" for note in [*notes, *more]))

    noted()
    found = run.generated()
    assert (found.samples, found.samples_twice) == (4, 0)
    assert found.tokens_again > 0
    noted({**place, "asked": samples[:2]})
    assert run.generated().samples_twice == 2

    ledger = run.ledger()
    assert oracle.strays_after_gc(ledger) == []
    folder = Path(run.store_url, "runs/tiny/iterations/000000")
    left = [folder / "stray", folder.parents[1] / "note"]
    for file in left:
        file.write_text("{}")
    assert oracle.strays_after_gc(ledger) == sorted(str(file.relative_to(run.store_url)) for file in left)

    assert oracle.not_recomputed(ledger) == []
    faster = config.model_copy(update={"training": config.training.model_copy(update={"lr": 2e-3})})
    monkeypatch.setattr(oracle, "_config", lambda ledger: faster)
    (found_otherwise,) = oracle.not_recomputed(ledger)
    assert found_otherwise.startswith("000000/train recomputed: state_digest is ")


def test_the_tally_adds_up_over_invocations(tmp_path: Path) -> None:
    file = tmp_path / "tally.jsonl"
    run = Tallied("2030-01-01", "a", "joined", 1, 9.0, 3, {"driver": 2, "gc": 1}, {"driver": [1.0, 4.0]}, 8, 0, 4, 0)
    add(run, file)
    assert read(file) == [run]
    add(Tallied("2030-01-02", "b", "head", 2, 9.0, 2, {"ray": 1}, {"ray": [30.0]}, 4, 1, 4, 2, ["worse"]), file)
    page = section(read(file))
    for line in (
        "3 processes killed at random, and 1 commands given beside a driver, in 2 runs of 5 drivers, ",
        "3 of them restarts:",
        "| finished samples generated twice | 1 of 12 |",
        "| state digests that differ from the undisturbed run's | 2 of 8 |",
        "| runs in which anything else was found | 1 |",
        "before it: median, worst | 4.0, 30.0 |",
        "| driver | 2 | 2.5, 4.0 |",
        "`a` 1, `b` 1",
        "Found in `b`: worse",
    ):
        assert line in page
