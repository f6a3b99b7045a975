"""Runs whose prompts have images: what they store, read again, verify and take out."""

import base64
import json
import re
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.images import Image
from cairn.flows.cli import app
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import Fault
from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query
from cairn.storage.upkeep.redaction import redact
from cairn.storage.upkeep.verification import verify
from cairn.tasks.batch.batch import trained_shards
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.recorded_run import RecordedRun
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.generation.groups import unfinished_group
from tests.tiny_run import DirectSteps, killed_driver, tiny_config, tiny_context, train_digests
from tests.vision import dots, noise


def images_config(assets: Path, data: Path, **sections: dict) -> RunConfig:
    """Of a run over rows with pictures, one shared by the first two."""
    return tiny_config(
        assets,
        model={"path": str(data / "untrained")},
        data={"path": str(data / "rows.jsonl"), "multimodal_keys": {"image": "picture"}, "rollout_shuffle": False},
        **sections,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = dots(tmp_path_factory.mktemp("root") / "dots")
    pictures = [noise(16, 16), noise(16, 16), noise(24, 16, seed=1), noise(16, 40, seed=2)]
    rows = []
    for number, picture in enumerate(pictures):
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        rows.append({"prompt": f"<image>Number {number}?", "label": "", "picture": url})
    rows[3]["picture"] = "three.png"
    (folder / "three.png").write_bytes(pictures[3])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def store(tiny_assets: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two iterations and a checkpoint after each."""
    folder = tmp_path_factory.mktemp("store")
    config = images_config(tiny_assets, data, rollout={"num_rollout": 2}, checkpoint={"save_interval": 1})
    assert setup_problems(config) + data_problems(config) == []
    with tiny_context(str(folder), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
    return folder


def ledger_of(store: Path) -> Ledger:
    return Ledger.open(open_store(str(store)), "tiny")


def rollouts(ledger: Ledger, index: int) -> list[Commit]:
    return [commit for commit in ledger.commits(index) if commit.step is Step.ROLLOUT]


def test_every_image_is_stored_once_and_named_by_each_sample(store: Path, tiny_assets: Path, data: Path) -> None:
    ledger = ledger_of(store)
    run = RecordedRun(images_config(tiny_assets, data), ledger)
    (commit,) = rollouts(ledger, 0)
    samples, stored = run.read(commit), run.images(commit)
    assert samples.num_rows == 16
    assert set(stored.values()) == {noise(16, 16), noise(24, 16, seed=1), noise(16, 40, seed=2)}
    named = [image["sha256"] for (image,) in samples.column("images").to_pylist()]
    assert set(named) == set(stored)
    assert len(set(named[:8])) == 1  # of two rows with the same picture
    assert verify_findings(ledger) == []


def verify_findings(ledger: Ledger) -> list[Fault]:
    return [finding.fault for verified in verify(ledger) for finding in verified.findings]


def test_what_is_trained_on_is_read_from_the_snapshot_and_not_from_the_data(
    store: Path, tiny_assets: Path, data: Path
) -> None:
    ledger = ledger_of(store)
    run = RecordedRun(images_config(tiny_assets, data.with_name("gone")), ledger)
    selection = last_selection(run, 1)
    shards, _ = trained_shards(run, selection)
    batch = train_batch(run, selection, shards)
    assert batch.images is not None
    assert [image.data for (image,) in batch.images[12:]] == [noise(16, 40, seed=2)] * 4
    assert {(image.height, image.width) for (image,) in batch.images} == {(16, 16), (24, 16), (16, 40)}


def test_a_group_that_is_continued_sees_the_image_of_the_snapshot(store: Path, tiny_assets: Path, data: Path) -> None:
    ledger = ledger_of(store)
    run = RecordedRun(images_config(tiny_assets, data.with_name("gone")), ledger)
    (commit,) = rollouts(ledger, 0)
    group = unfinished_group(run.read(commit).filter(pc.field("group_id") == 3), run.images(commit))
    expected = (Image(noise(16, 40, seed=2), 16, 40),)
    assert group.prompt.images == expected
    assert [request.images for request in group.requests(finished=())] == [expected] * len(group.requests(finished=()))


def test_models_and_servers_that_see_no_images_are_refused(tiny_assets: Path, data: Path) -> None:
    text = str(tiny_assets / "model")
    cases: dict[str, dict] = {
        r"model.ref_path: the model in .* \(qwen3\) sees no images": {
            "model": {"ref_path": text},
            "algorithm": {"use_kl_loss": True},
        },
        "training.engine: .* reads images, which are not passed to Megatron": {"training": {"engine": "megatron"}},
        "rollout.engine is sglang, and the model in .* reads images": {"rollout": {"engine": "sglang"}},
        "model.teacher_url: .* scores only text": {
            "model": {"teacher_url": "http://127.0.0.1:1", "teacher_name": "t"},
            "algorithm": {"use_opd": True},
        },
    }
    base = images_config(tiny_assets, data).model_dump(mode="json")
    for message, sections in cases.items():
        changed = {name: {**base[name], **options} for name, options in sections.items()}
        problems = setup_problems(RunConfig.model_validate({**base, **changed}))
        assert any(re.search(message, problem) for problem in problems), problems


def test_an_image_that_was_altered_is_found_by_verify(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("runs/tiny/iterations/000000/rollout/*/images.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert verify_findings(ledger_of(tmp_path)) == [Fault.ALTERED]


def test_a_redacted_prompt_takes_its_image_along_unless_another_has_it(
    store: Path, tiny_assets: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path, dirs_exist_ok=True)
    ledger = ledger_of(tmp_path)
    config = images_config(tiny_assets, data)
    redact(ledger, 0, by="x")
    run = RecordedRun(config, ledger)
    assert set(run.images(rollouts(ledger, 0)[0]).values()) >= {noise(16, 16)}
    redact(ledger, 2, by="x")
    reopened = RecordedRun(config, ledger)
    for index in range(2):
        (commit,) = rollouts(ledger, index)
        assert set(reopened.images(commit).values()) == {noise(16, 16), noise(16, 40, seed=2)}
        assert [image is None for image in reopened.read(commit).column("images").to_pylist()[::4]] == [1, 0, 1, 0]
    assert verify_findings(ledger) == []


def test_people_see_which_images_a_prompt_has(store: Path, tiny_assets: Path, data: Path) -> None:
    ledger = ledger_of(store)
    named = RecordedRun(images_config(tiny_assets, data), ledger).images(rollouts(ledger, 0)[0])
    shown = CliRunner().invoke(app, ["show", "tiny@0", "--store", str(store), "--limit", "16", "--json"])
    assert {image["sha256"] for view in json.loads(shown.stdout) for image in view["images"]} == set(named)
    printed = CliRunner().invoke(app, ["show", "tiny@0/12", "--store", str(store)])
    assert "(40 × 16 pixels)" in printed.output
    query = "SELECT DISTINCT image.sha256 FROM (SELECT unnest(images) AS image FROM samples)"
    assert {row["sha256"] for row in open_query(open_store(str(store))).sql(query).to_pylist()} == set(named)


@pytest.mark.slow
def test_a_run_on_images_that_is_killed_ends_as_one_that_was_not(tiny_assets: Path, data: Path, tmp_path: Path) -> None:
    config = images_config(tiny_assets, data, rollout={"num_rollout": 2})
    with tiny_context(str(tmp_path / "whole"), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        expected = train_digests(run, range(2))
    killed_driver(str(tmp_path / "killed"), config, Step.TRAIN)
    with tiny_context(str(tmp_path / "killed"), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        assert train_digests(run, range(2)) == expected
        assert verify_findings(run.ledger) == []
