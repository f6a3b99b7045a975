"""Lineage: where a sample came from and what it went into follows from the ledger's commits and tables."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import cairn
from cairn.flows.cli import app
from cairn.flows.reading.lineage import lineage
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.ledger.schemas import SCORE
from cairn.storage.store.errors import Damaged, Retired
from tests.flows.written_runs import new_run, write_iteration, write_run
from tests.storage.builders import ENVIRONMENT


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Three iterations, in steps of one weight version; checkpoints after the second and the last."""
    ledger = new_run(str(tmp_path_factory.mktemp("store")))
    write_run(ledger, 3)
    return ledger


def test_a_sample_is_followed_from_its_prompt_to_the_checkpoints(toy: Ledger) -> None:
    found = lineage(toy, 1, group_id=4, sample_index=1)
    commits = {commit.name: commit for i in range(3) for commit in toy.commits(i)}
    assert (found.iteration, found.shard) == (1, "00-000")
    assert (found.prompt.data, found.prompt.data_digest, found.prompt.row) == ("train.jsonl", "0" * 64, 4)
    assert (found.prompt.text, found.prompt.label) == ("[4] 2 + 2 =", "4")
    (weights,) = found.sampled.weights
    assert (weights.version, weights.state_digest, weights.made_by.name) == (1, f"{1:064x}", "000000/train")
    assert (found.sampled.engine, found.sampled.seed, found.sampled.tokens) == ("rollout-0", 4, 3)
    assert found.sampled.environment == ENVIRONMENT
    assert (found.grade.reward, found.grade.grader, found.grade.grader_version) == (0, "exact_match", "1")
    assert [(j.iteration, j.disposition, j.reason) for j in found.judgements] == [(1, "train", None)]
    assert (found.update.advantage, found.update.samples, found.update.loss) == (-1, 4, 0.1)
    assert (found.update.weight_version_in, found.update.weight_version_out) == (1, 2)
    assert found.update.state_digest == f"{2:064x}"
    assert [(saved.iteration, saved.state_digest) for saved in found.checkpoints] == [
        (1, f"{2:064x}"),
        (2, f"{3:064x}"),
    ]
    made = [found.sampled.made_by, found.grade.made_by, found.update.estimated_by, found.update.made_by]
    assert [one.name for one in made] == [
        "000001/rollout.00-000",
        "000001/reward.00-000",
        "000001/advantage",
        "000001/train",
    ]
    assert all(one.digest == commits[one.name].digest for one in made)


def test_a_sample_of_the_first_iteration_comes_from_the_initial_weights(toy: Ledger) -> None:
    (weights,) = lineage(toy, 0, 0, 0).sampled.weights
    assert (weights.version, weights.state_digest, weights.made_by) == (0, None, None)


def test_a_dropped_sample_went_into_nothing(toy: Ledger) -> None:
    found = lineage(toy, 2, 8, 0, token=0)
    assert [(j.disposition, j.reason) for j in found.judgements] == [("drop", "zero_std_1")]
    assert (found.update, found.checkpoints) == (None, ())
    assert (found.token.log_prob, found.token.advantage, found.token.ratio) == (-0.5, None, None)


def test_a_buffered_sample_is_followed_to_the_iteration_that_trains_on_it(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    write_iteration(ledger, 1, buffered=(1,))
    from_its_use = lineage(ledger, 1, 1, 0)
    assert from_its_use == lineage(ledger, 0, 1, 0)
    assert from_its_use.iteration == 0


def test_a_token_has_its_ratio_where_the_old_policy_scored_it(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    attempt = ledger.attempt(0, Step.SCORE)
    rows = [{"group_id": 0, "sample_index": 1, "log_probs": [-0.25, -0.75], "ref_log_probs": None}]
    schema = pa.schema([SCORE.field(name) for name in rows[0]])
    ledger.commit(
        iteration=0, step=Step.SCORE, shard=None, attempt=attempt, inputs={}, config_digest="0" * 64,
        environment=ENVIRONMENT, started_at=0.0,
        outputs=[attempt.write_table("scores.parquet", pa.Table.from_pylist(rows, schema))],
    )  # fmt: skip
    token = lineage(ledger, 0, 0, 1, token=1).token
    assert (token.position, token.token_id, token.advantage, token.weight_version) == (1, 7, -1, 0)
    assert (token.log_prob, token.old_log_prob, token.ref_log_prob) == (-0.5, -0.75, None)
    assert token.ratio == pytest.approx(0.7788007830714049)  # exp(-0.25)
    table = cairn.open(ledger.store.url).sql("SELECT ratio FROM tokens WHERE group_id = 0 AND sample_index = 1")
    assert table.column("ratio").to_pylist() == pytest.approx([1.2840254166877414, token.ratio])


def test_a_fork_tells_what_its_parent_made_and_what_it_made_of_it(tmp_path: Path) -> None:
    toy = new_run(str(tmp_path))
    write_run(toy, 3)
    manifest = toy.manifest
    fork = Ledger.create(
        toy.store, "fork", manifest.config, manifest.inputs, Parent(run="toy", iteration=1), manifest.rules
    )
    fork.acquire()
    write_iteration(fork, 2)
    found = lineage(fork, 1, 4, 1)
    assert found.sampled.made_by == lineage(toy, 1, 4, 1).sampled.made_by
    assert [(saved.iteration, saved.run) for saved in found.checkpoints] == [(1, "toy"), (2, "fork")]
    (weights,) = lineage(fork, 2, 7, 0).sampled.weights
    assert (weights.made_by.name, weights.made_by.run) == ("000001/train", "toy")


def test_what_is_gone_or_altered_is_an_error_that_names_it(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_run(ledger, 2)
    (file,) = (Path(ledger.store.url) / layout.attempts("toy", 1, Step.REWARD)).glob("00-000*/*.parquet")
    file.write_bytes(b"")
    with pytest.raises(Damaged, match=file.parent.name):
        lineage(ledger, 1, 4, 1)
    ledger.store.write(layout.retired("toy", 1, layout.Kind.SNAPSHOTS), b"{}")
    file.unlink()
    with pytest.raises(Retired, match="deletes its older files"):
        lineage(ledger, 1, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy@1/77/0"], "no group 77 in iteration 1; it has groups 3 to 5"),
        (["toy@1/4/9"], "no sample 9"),
        (["toy@1/4/0", "3"], "tokens 0 to 2, not 3"),
        (["toy@7/4/0"], "it has no samples"),
        ([f"toy@1/{2**63}/0"], "a sample is a number up to"),
        (["toy@1/4/-1"], "is not RUN[@ITER[/SAMPLE]], such as quickstart@19/3"),
        (["toy@" + "9" * 5000], "is not RUN[@ITER[/SAMPLE]], such as quickstart@19/3"),
        (["toy@1/٣"], "is not RUN[@ITER[/SAMPLE]], such as quickstart@19/3"),
        (["toi@1/4/0"], "there is no run 'toi'"),
    ],
)
def test_what_is_not_there_is_bad_input(toy: Ledger, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["lineage", *arguments, "--store", toy.store.url])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_prints_the_same_for_people_and_machines(toy: Ledger) -> None:
    arguments = ["lineage", "toy@1/4/1", "0", "--store", toy.store.url]
    output = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert output == lineage(toy, 1, 4, 1, token=0).model_dump(mode="json")
    text = CliRunner().invoke(app, arguments).stdout
    for fact in (
        "row 4 of train.jsonl",
        "version 1 → 2",
        "state 000000000000",
        "exact_match",
        "of iterations 1, 2",
        "age –",
    ):
        assert fact in text
    assert r"5 \x1b[31m" in text  # nothing in a sample steers the terminal


def test_neither_torch_nor_ray_nor_prefect_is_imported_for_it(toy: Ledger) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cairn.flows.cli import app;"
        f"r = CliRunner().invoke(app, ['lineage', 'toy@1/4/1', '--store', {toy.store.url!r}]);"
        "print(r.exit_code, [m for m in ('torch', 'ray', 'prefect', 'transformers', 'duckdb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "0 []"
