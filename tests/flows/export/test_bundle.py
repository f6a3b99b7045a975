"""One sample in one file: whole, checked anywhere, and graded again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from cairn.flows.export.bundle import CONTENTS, STORE
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.shards import read_commits, record_bytes
from cairn.storage.store import canonical
from tests.commands import cairn
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

ROLLOUT = "/rollout/"


@pytest.fixture(scope="module")
def made(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the run `tiny`, graded by a file of one's own, and `built_in`; two iterations of each, signed."""
    folder = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as environment:
        (folder / "signers").write_text(cairn("keygen", folder / "key", "--as", "ada").stdout)
        environment.setenv("CAIRN_SIGNING_KEY", str(folder / "key"))
        for name, reward in (("tiny", {}), ("built_in", {"rm_type": "random", "custom_rm_path": None})):
            rollout = {"num_rollout": 2, "rollout_batch_size": 2, "rollout_max_response_len": 8}
            config = tiny_config(tiny_assets, rollout=rollout, reward=reward, checkpoint={"save_interval": 1})
            with tiny_context(str(folder / "store"), config, name) as (run, _):
                for index in range(2):
                    iteration(run, DirectSteps(run), index)
    for name in ("tiny", "built_in"):
        result = cairn("bundle", f"{name}@1/5", folder / f"{name}.zip", "--weights", "--store", folder / "store")
        assert result.exit_code == 0, result.output
    (folder / "store").rename(folder / "gone")
    return str(folder)


def test_a_bundle_is_checked_without_its_store_and_its_sample_graded_again(made: str) -> None:
    result = cairn("unbundle", f"{made}/built_in.zip", "--signers", f"{made}/signers", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["problems"], found["not_graded"]) == ([], None)
    assert found["graded_again"] == found["reward"]
    assert found["contents"]["newest"].startswith("000001/")
    assert found["contents"]["checkpoint"] == "000000/checkpoint"
    assert found["commits"] >= 12
    assert found["tables"] > 4, "its own and the checkpoint's"


def test_code_in_a_bundle_runs_only_where_it_is_trusted(made: str) -> None:
    answer = json.loads(cairn("unbundle", f"{made}/tiny.zip", "--json").stdout)
    assert (answer["problems"], answer["graded_again"]) == ([], None)
    assert "--trust-code" in answer["not_graded"]
    answer = json.loads(cairn("unbundle", f"{made}/tiny.zip", "--trust-code", "--json").stdout)
    assert (answer["problems"], answer["not_graded"]) == ([], None)
    assert answer["graded_again"] == pytest.approx(answer["reward"], rel=1e-6)


def reward_of_ten(name: str, data: bytes) -> bytes:
    """The commits of rewards say something else, with digests that are right for it."""
    if "/000001/shards." in name and name.endswith(".json"):
        commits = read_commits(data, name.removeprefix(f"{STORE}/"))
        other = {"metrics": {"failed_samples": 10.0}}
        return record_bytes([one.model_copy(update=other) if one.step is Step.REWARD else one for one in commits])
    return data


def another_table(name: str, data: bytes) -> bytes:
    return data[:-9] + b"x" + data[-8:] if ROLLOUT in name and name.endswith(".parquet") else data


def contents_with(**changes: Any) -> Callable[[str, bytes], bytes]:
    """The bundle says other things of itself; those of `given` beside what it says."""

    def tampering(name: str, data: bytes) -> bytes:
        if name != CONTENTS:
            return data
        fields = canonical.unseal(data)
        grader_input = {**fields["given"], **changes.get("given", {})}
        return canonical.seal({**fields, **changes, "given": grader_input})

    return tampering


def without_its_advantage(name: str, data: bytes) -> bytes | None:
    return None if "/000001/advantage/" in name else data


def without_its_past(name: str, data: bytes) -> bytes | None:
    return None if "/000000/train.json" in name else data


@pytest.mark.parametrize(
    ("tampering", "sentence"),
    [
        (reward_of_ten, "was made from 000001/reward.00-000, which has another digest here"),
        (another_table, "is not what was committed"),
        (contents_with(given={"response": "a better answer"}), "differs from the sample's row: response"),
        (contents_with(given={"segments": [{"foo": 1}]}), "input in the bundle is not a sample: segments.0"),
        (contents_with(given={"response_ids": None}), "input in the bundle is not a sample: response_ids"),
        (contents_with(iteration=0), "iteration 0 is not known to have taken group"),
        (contents_with(generated_in=0), "says that iteration 0 generated the sample, but names 000001/rollout"),
        (contents_with(group_id=2**70), "cannot be read"),
        (contents_with(newest="nothing"), "cannot be read"),
        (without_its_advantage, "a file of 000001/advantage, is missing"),
        (without_its_past, "was made from 000000/train, which is missing"),
    ],
)
def test_whatever_was_altered_in_a_bundle_is_named(
    made: str, tmp_path: Path, tampering: Callable[[str, bytes], bytes | None], sentence: str
) -> None:
    altered = tmp_path / "altered.zip"
    with ZipFile(f"{made}/built_in.zip") as source, ZipFile(altered, "w") as target:
        for name in source.namelist():
            data = tampering(name, source.read(name))
            if data is not None:
                target.writestr(name, data)
    result = cairn("unbundle", altered)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert sentence in result.output


def test_what_is_no_bundle_or_no_sample_is_said_in_a_sentence(made: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("no zip")
    result = cairn("unbundle", tmp_path / "other")
    assert (result.exit_code, "is not a bundle of Cairn" in result.stderr) == (1, True)
    assert cairn("unbundle", tmp_path / "absent").exit_code == 2
    store = ("--store", f"{made}/gone")
    assert "has samples 0 to 7, not 8" in cairn("bundle", "tiny@1/8", tmp_path / "new.zip", *store).stderr
    taken = cairn("bundle", "tiny@1/5", tmp_path / "other", *store)
    assert (taken.exit_code, "exists already" in taken.stderr) == (2, True)
