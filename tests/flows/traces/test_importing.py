"""`cairn import traces`: other trainers' samples as a run. The files of TRL were written by TRL 1.16 itself, those of
prime-rl by verifiers, those of verl by its own format."""

import json
import math
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verifiers.v1 as vf

import cairn as cairn_api
from cairn.flows.traces import importing
from cairn.flows.traces.importing import Importer, open_imported
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Imported
from cairn.storage.opening import open_store
from tests.commands import cairn

TRL = Path(__file__).parents[2] / "fixtures" / "traces" / "trl"
"""Output folder of TRL's GRPOTrainer: 4 steps of 4 prompts × 4 samples of the quickstart's model, with the reward
functions `right` and `short`, the first of which logged the label."""
GRADER = """
import re

def grade(response, label, metadata):
    boxed = re.findall(r"\\\\boxed{([^}]*)}", response)
    return float(bool(boxed) and boxed[-1].split() == label.split()) + 0.1 * (len(response) < 30)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(*arguments: object) -> dict[str, Any]:
    """The result of an import into the folder's store."""
    result = cairn("import", "traces", *arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refusal(*arguments: object) -> str:
    result = cairn(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr


def sql(text: str) -> list[dict[str, Any]]:
    return cairn_api.open(".").sql(text).to_pylist()


def lines(file: Path, *rows: object) -> Path:
    """Write what verl's `_dump_generations` writes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return file


def verl_row(prompt: str, answer: str, score: object, step: int = 1, **others: object) -> dict[str, object]:
    return {"input": prompt, "output": answer, "gts": "4", "score": score, "step": step, **others}


def test_what_trl_recorded_is_a_run_with_rewards_and_advantages() -> None:
    assert imported(TRL, "--run", "grpo") == {
        "run": "grpo", "format": "trl", "source": str(TRL), "iterations": 4, "samples": 64, "problems": []
    }  # fmt: skip
    written = [row for step in range(1, 5) for row in pq.read_table(_completions(step)).to_pylist()]
    found = sql("SELECT * FROM samples WHERE run = 'grpo' ORDER BY iteration, group_id, sample_index")
    assert [row["prompt"] for row in found] == [row["prompt"][0]["content"] for row in written]
    assert [row["response"] for row in found] == [row["completion"][0]["content"] for row in written]
    assert [row["label"] for row in found] == [row["label"] for row in written]
    assert [row["reward"] for row in found] == pytest.approx([row["right"] + row["short"] for row in written])
    assert [row["advantage"] for row in found] == pytest.approx([row["advantage"] for row in written])
    assert {row["trained_in"] - row["iteration"] for row in found} == {0}
    lacking = ("prompt_ids", "response_ids", "response_tokens", "log_prob", "weight_version", "seed", "finish_reason")
    assert {row[name] for row in found for name in (*lacking, "status", "engine", "prompt_index")} == {None}
    assert sql("SELECT count(*) AS tokens FROM tokens") == [{"tokens": 0}]
    (run,) = sql("SELECT model, config, json_extract_string(imported, '$.format') AS format FROM runs")
    assert run == {"model": None, "config": None, "format": "trl"}
    steps = sql("SELECT metrics['step'] AS step FROM steps WHERE step = 'rollout' ORDER BY iteration")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    status = json.loads(cairn("status", "grpo", "--json").stdout)
    assert (status["state"], status["iterations"], status["num_rollout"]) == ("completed", 4, 4)
    assert status["reward"] == pytest.approx(sum(row["reward"] for row in found[48:]) / 16)
    assert "grpo  completed" in re.sub(" +", "  ", cairn("runs").stdout)
    assert "Sort the digits" in cairn("show", "grpo@3").stdout
    compared = cairn("compare", "grpo@1", "grpo@3")
    assert (compared.exit_code, "took" in compared.stdout) == (0, False)
    assert "reward" in compared.stdout
    verified = cairn("verify", "grpo")
    assert verified.exit_code == 0
    assert "16 trained on" in verified.stdout


def _completions(step: int) -> Path:
    return TRL / "completions" / f"completions_{step:05d}.parquet"


def test_the_same_grader_gives_the_recorded_rewards_and_the_same_estimator_the_recorded_advantages() -> None:
    imported(TRL, "--run", "grpo")
    Path("rewards.py").write_text(GRADER)
    rescored = json.loads(cairn("rescore", "grpo", "--reward", "rewards.py:grade", "--json").stdout)
    assert (rescored["overall"]["samples"], rescored["overall"]["changed"]) == (64, 0)
    other = json.loads(cairn("rescore", "grpo", "--reward", "exact_match", "--json").stdout)
    assert other["overall"]["changed"] == 64
    # TRL divides by the sample's standard deviation plus 1e-4, this estimator by that plus 1e-6.
    same = json.loads(cairn("whatif", "grpo@0", "--json").stdout)
    assert same["overall"]["size_after"] == pytest.approx(same["overall"]["size_before"], rel=1e-3)
    assert same["notes"] == ["the traces have no tokens: each response counts as one"]
    rloo = json.loads(cairn("whatif", "grpo@0", "--set", "algorithm.advantage_estimator=rloo", "--json").stdout)
    for sample in rloo["samples"]:
        rewards = [one["reward"] for one in rloo["samples"] if one["group_id"] == sample["group_id"]]
        others = (sum(rewards) - sample["reward"]) / 3
        assert sample["advantage_after"] == pytest.approx(sample["reward"] - others, abs=1e-6)


def test_the_weights_of_trls_rewards_can_be_named_and_wrong_ones_are_noticed(tmp_path: Path) -> None:
    imported(TRL, "--run", "weighted", "--reward", "right=2", "--reward", "short")
    assert sql("SELECT max(reward) AS best FROM samples")[0]["best"] == pytest.approx(2.1)
    assert "--reward right=2" in refusal("import", "traces", TRL, "--run", "weighted")
    assert "no column wrong, which --reward names" in cairn("import", "traces", TRL, "--reward", "wrong").stderr
    folder = tmp_path / "odd"
    (folder / "completions").mkdir(parents=True)
    table = pq.read_table(_completions(1))
    odd = table.append_column("length", pa.array([1.0 - 9 * row["right"] for row in table.to_pylist()]))
    pq.write_table(odd, folder / "completions" / "completions_00001.parquet")
    (problem,) = imported(folder)["problems"]
    assert "advantages do not follow from the rewards right + short + length" in problem


def test_verls_lines_are_grouped_by_prompt_and_graded_again(tmp_path: Path) -> None:
    source = tmp_path / "sums"
    rows = [verl_row("2 + 2?", f"\\boxed{{{n}}}", float(n == 4), acc=n == 4, pred=str(n)) for n in (4, 5, 4)]
    lines(source / "1.jsonl", rows[0], verl_row("1 + 3?", "\\boxed{4}", 1.0), rows[1], rows[2])
    lines(source / "2.jsonl", verl_row("2 + 2?", "\\boxed{4}", 1, 2), verl_row("2 + 2?", "Ünklar 🤷", 0, 2))
    lines(source / "10.jsonl", verl_row("2 + 2?", "\\boxed{4}", 1, 10))
    found = imported(source)
    assert (found["run"], found["format"], found["iterations"]) == ("sums", "verl", 3)
    groups = sql("SELECT iteration, group_id, count(*) AS n, avg(reward) AS r FROM samples GROUP BY ALL ORDER BY ALL")
    assert [(row["iteration"], row["n"]) for row in groups] == [(0, 3), (0, 1), (1, 2), (2, 1)]
    assert [row["group_id"] for row in groups] == [0, 1, 2, 3]
    assert groups[0]["r"] == pytest.approx(2 / 3)
    first = sql("SELECT components, metadata FROM samples WHERE iteration = 0 AND group_id = 0 AND sample_index = 0")[0]
    assert json.loads(first["components"]) == {"acc": 1.0}
    assert json.loads(first["metadata"]) == {"acc": True, "pred": "4", "step": 1}
    rescored = json.loads(cairn("rescore", "sums", "--reward", "math", "--json").stdout)
    assert rescored["overall"]["changed"] == 0
    whatif = json.loads(cairn("whatif", "sums@0", "--json").stdout)
    assert whatif["notes"][0] == "the traces have no advantages: those before are computed by grpo"
    assert whatif["overall"]["correlation"] == pytest.approx(1)


def node(message: dict[str, Any], ids: list[int], logprobs: Sequence[float] = (), **others: Any) -> dict[str, Any]:
    """A message of a trace, whose last tokens, those with log-probs, are sampled."""
    mask = [place >= len(ids) - len(logprobs) for place in range(len(ids))]
    own = {"message": message, "token_ids": ids, "mask": mask, "logprobs": logprobs, "sampled": bool(logprobs)}
    return {**own, **others}


def episode(group: str, answer: str, score: float | None, **trace: Any) -> dict[str, Any]:
    """A record of verifiers: two turns with a tool's answer between them, as a rollout for training."""
    call = {"role": "assistant", "content": "look", "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}]}
    nodes = [
        node({"role": "user", "content": "2 + 2?"}, [5, 6]),
        node(call, [1, 7, 8], [-0.5, -0.25], parent=0, advantages=[0.5, 0.5]),
        node({"role": "tool", "tool_call_id": "c", "content": "4"}, [9], parent=1),
        node({"role": "assistant", "content": answer}, [1, 10], [-2.0], parent=2, advantages=[-1.0]),
    ]
    task = {"type": "T", "data": {"idx": 0, "prompt": "2 + 2?", "answer": "4"}}
    made = vf.WireEpisode.model_validate(
        {
            "task": task,
            "group": {"id": group},
            "ok": True,
            "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 7, "policy": {"start": 5, "end": 6}}},
            "traces": [
                {
                    "task": task,
                    "agent": {"config": {}},
                    "nodes": nodes,
                    "ok": True,
                    "stop_condition": "done",
                    "calls": [{"node": 1, "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"}],
                    "rewards": {} if score is None else {"right": {"score": score, "weight": 0.5}},
                    **trace,
                }
            ],
        }
    )
    record: dict[str, Any] = made.to_record()
    return record


def test_prime_rls_episodes_keep_tokens_log_probs_masks_and_advantages(tmp_path: Path) -> None:
    step = tmp_path / "out" / "rollouts" / "step_7" / "train"
    failed = [{"type": "ProviderError", "message": "gone"}]
    good = [episode("a", "\\boxed{4}", 1.0), episode("a", "five", 0.0), episode("b", "\\boxed{4}", 1.0)]
    lines(step / "effective" / "traces.jsonl", *good)
    lines(step / "all" / "traces.jsonl", *good, episode("c", "", None, ok=False, nodes=[], calls=[], errors=failed))
    assert imported(tmp_path / "out")["samples"] == 3
    first = sql("SELECT * FROM samples WHERE run = 'out' ORDER BY group_id, sample_index LIMIT 1")[0]
    assert first["prompt_ids"] == [5, 6, 1]
    assert first["response_ids"] == [7, 8, 9, 1, 10]
    assert (first["masked_tokens"], first["weight_version"]) == (2, 6)
    assert (first["finish_reason"], first["status"], first["label"], first["reward"]) == ("stop", "completed", "4", 0.5)
    assert first["response"] == "[assistant]\nlook\n[tool call f {}]\n\n[tool]\n4\n\n[assistant]\n\\boxed{4}"
    tokens = sql("SELECT log_prob, loss_mask, advantage FROM tokens WHERE group_id = 0 AND sample_index = 0")
    assert [row["log_prob"] for row in tokens] == [-0.5, -0.25, 0, 0, -2]
    assert [row["loss_mask"] for row in tokens] == [1, 1, 0, 0, 1]
    assert [row["advantage"] for row in tokens] == [0.5, 0.5, 0, 0, -1]
    segments = sql("SELECT tokens, sampled FROM segments WHERE group_id = 0 AND sample_index = 0 ORDER BY segment")
    assert [(row["tokens"], row["sampled"]) for row in segments] == [(2, True), (2, False), (1, True)]
    assert json.loads(cairn("whatif", "out@0", "--json").stdout)["overall"]["trained_tokens"] == 9
    everything = imported(step / "all", "--run", "all")
    assert (everything["samples"], everything["problems"]) == (4, [])
    (lost,) = sql("SELECT status, error, reward FROM samples WHERE run = 'all' AND status = 'failed'")
    assert lost == {"status": "failed", "error": "ProviderError: gone", "reward": None}
    assert json.loads(cairn("rescore", "all", "--reward", "math", "--json").stdout)["overall"]["failed_after"] == 1


def test_branches_of_a_trace_are_trajectories_of_a_sample(tmp_path: Path) -> None:
    nodes = [
        node({"role": "user", "content": "go"}, [1]),
        node({"role": "assistant", "content": "left"}, [2], [-1.0], parent=0),
        node({"role": "assistant", "content": "right"}, [3], [-1.0], parent=0),
    ]
    imported(lines(tmp_path / "eval" / "traces.jsonl", episode("a", "", 1.0, nodes=nodes, calls=[])))
    (sample,) = sql("SELECT response, response_ids, trajectories FROM samples")
    assert sample == {"response": "right", "response_ids": [2, 3], "trajectories": [1, 1]}


HOSTILE = {
    "half a line": '{"input": "2 + 2?", "outp',
    "not an object": "[1, 2]",
    "no output": '{"input": "2 + 2?", "score": 1}',
    "a score of text": json.dumps(verl_row("a", "b", "much")),
    "an output of numbers": json.dumps({**verl_row("a", "b", 1), "output": [1, 2]}),
    "a step of text": json.dumps({**verl_row("a", "b", 1), "step": "one"}),
    "a number of 5,000 digits": '{"input": "a", "output": "b", "score": ' + "9" * 5000 + "}",
    "100,000 brackets": "[" * 100_000,
    "bytes that are no text": b"\xff\xfe{}".decode("latin-1"),
}


def test_bad_lines_are_named_and_left_out(tmp_path: Path) -> None:
    good = json.dumps(verl_row("2 + 2?", "4", 1))
    file = tmp_path / "d" / "1.jsonl"
    file.parent.mkdir()
    file.write_bytes("\n".join([good, *HOSTILE.values(), good, ""]).encode("latin-1"))
    result = cairn("import", "traces", file.parent)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    named = [line for line in result.stderr.splitlines() if " is left out: " in line]
    assert [line.partition(" is")[0] for line in named] == [f"{file}, line {n}" for n in range(2, 2 + len(HOSTILE))]
    assert sql("SELECT count(*) AS n, sum(reward) AS r FROM samples") == [{"n": 2, "r": 2.0}]
    commands = result.stdout.splitlines()[-1].removeprefix("look: ").split("; ")
    assert [cairn(*shlex.split(one)[1:]).exit_code for one in commands] == [0, 0], "what it prints works as printed"


def test_rewards_that_are_no_numbers_fail_their_samples_alone(tmp_path: Path) -> None:
    file = tmp_path / "d" / "1.jsonl"
    file.parent.mkdir()
    odd = ("NaN", "Infinity", "1e400", "1e39", "9" * 400, "null", '"\\ud800"')
    texts = '"output": "\\u0000\\u001b[31m", "gts": null'
    rows = [f'{{"input": "\\ud800 {n}", {texts}, "score": {score}}}' for n, score in enumerate(odd)]
    file.write_text("\n".join([*rows, json.dumps(verl_row("ok", "4", 1))]) + "\n")
    assert len(imported(file.parent)["problems"]) == 1  # that of a text
    found = sql("SELECT reward, error FROM samples ORDER BY group_id")
    assert [row["reward"] for row in found] == [None] * 6 + [1.0]
    assert {row["error"] for row in found[:6]} == {"the traces have no reward that is a finite number"}
    assert "\x1b" not in cairn("show", "d@0", "--limit", 9).stdout
    assert "have no reward" in refusal("whatif", "d@0")
    assert cairn("report", "d").exit_code == 0


class _Unpickled(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.string(), "test.unpickled")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: object, serialized: bytes) -> "_Unpickled":
        return cls()


def test_damaged_parquet_and_pickles_are_never_opened(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "completions"
    shutil.copytree(TRL / "completions", folder)
    whole = (folder / "completions_00002.parquet").read_bytes()
    (folder / "completions_00002.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "completions_00003.parquet").write_bytes(b"PAR1" + b"\x00" * 40 + b"\xff\xff\xff\x7fPAR1")
    extended = pa.table({"prompt": pa.ExtensionArray.from_storage(_Unpickled(), pa.array(["x"])), "completion": ["y"]})
    pq.write_table(extended, folder / "completions_00004.parquet")
    pq.write_table(pa.table({"prompt": ["x"]}), folder / "completions_00005.parquet")
    found = imported(folder.parent)
    assert (found["iterations"], len(found["problems"])) == (1, 4)
    assert all(f"completions_0000{n}.parquet is left out: " in text for n, text in enumerate(found["problems"], 2))
    assert "extension type" in found["problems"][2]
    assert "no column completion" in found["problems"][3]
    (folder / "completions_00002.parquet").write_bytes(whole)
    assert imported(folder.parent)["iterations"] == 1
    pickle = tmp_path / "step_1.pt"
    pickle.write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    assert "may be a pickle, which is never opened" in refusal("import", "traces", pickle)


def test_bad_requests_are_refused_before_a_run_exists(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no traces of a known format; traces are completions/" in refusal("import", "traces", "empty")
    assert "no traces of verl, which are <step>.jsonl" in refusal("import", "traces", "empty", "--format", "verl")
    assert "there is no file or folder nowhere" in refusal("import", "traces", "nowhere")
    assert "chooses columns of TRL's files, but" in refusal(
        *("import", "traces", lines(tmp_path / "1.jsonl", verl_row("a", "b", 1)), "--reward", "x")
    )
    assert "--reward a=b is not NAME or NAME=WEIGHT" in refusal("import", "traces", TRL, "--reward", "a=b")
    assert "run '..' is not a usable name" in refusal("import", "traces", TRL, "--run", "..")
    assert not Path("runs").exists()


LACKING = (
    *("resume r", "fork r@0 other", "replay r@0 rollout", "replay r --all", "replay r --weights", "eval r gsm8k"),
    *("export r folder", "export r folder --format atif", "bundle r@0/0 sample.zip"),
    *("costs r", "timeline r@0 trace.json", "lineage r@0/0 0"),
)


def test_what_an_imported_run_lacks_is_said_in_one_sentence(tmp_path: Path) -> None:
    imported(lines(tmp_path / "1.jsonl", verl_row("a", "b", 1)), "--run", "r")
    for command in LACKING:
        sentence = refusal(*command.split())
        assert sentence.startswith(f"run 'r' was imported from {tmp_path / '1.jsonl'} (verl), which has no "), command
        assert len(sentence.splitlines()) == 1


def test_a_grader_must_be_named_for_an_imported_run(tmp_path: Path) -> None:
    imported(lines(tmp_path / "1.jsonl", verl_row("a", "b", 1)), "--run", "r")
    assert "name a grader with --reward" in refusal("rescore", "r")


def test_the_report_shows_an_imported_run_without_what_it_lacks(tmp_path: Path) -> None:
    imported(TRL, "--run", "grpo")
    assert cairn("report", "grpo").exit_code == 0
    page = (tmp_path / "grpo.html").read_text()
    assert f"Imported from {TRL} (trl)" in page
    assert 'id="samples"' in page
    assert not any(f'<section id="{part}">' in page for part in ("time", "configuration", "evaluation"))


Make = Callable[..., Importer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make an importer of the folder `live` as a new process would: the one before owns the run no more."""
    (tmp_path / "live").mkdir()
    owned: list[Ledger] = []

    def make(run: str = "live") -> Importer:
        for ledger in owned:
            assert ledger.lease is not None
            ledger.lease.release(Outcome.STOPPED)
        origin = Imported(format="verl", source=str(tmp_path / "live"))
        owned.append(open_imported(open_store(str(tmp_path)), run, origin))
        owned[-1].acquire()
        importer = Importer(owned[-1], lambda sentence: None)
        importer.resume()
        return importer

    return make


def test_an_import_that_is_killed_anywhere_goes_on_without_losing_or_doubling_a_row(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two iterations have eight commits; an import dies before each of them, and the last one after all."""
    for step in (1, 2):
        lines(tmp_path / "live" / f"{step}.jsonl", *(verl_row(f"{step} {n % 2}", f"{n}", n, step) for n in range(4)))
    commit = Ledger.commit

    class Killed(BaseException):
        pass

    for commits in range(9):
        left = iter(range(commits))

        def dying(ledger: Ledger, left: Any = left, **arguments: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return commit(ledger, **arguments)

        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(Ledger, "commit", dying)
            make(f"killed-{commits}").once()
        assert next(left, None) is None
        make(f"killed-{commits}").once()
    make("killed-8").once()
    columns = "run, iteration, group_id, sample_index, response, reward"
    expected = [
        (f"killed-{run}", step, 2 * step + n % 2, n // 2, str(n), float(n))
        for run in range(9)
        for step in (0, 1)
        for n in (0, 2, 1, 3)
    ]
    assert [tuple(row.values()) for row in sql(f"SELECT {columns} FROM samples ORDER BY ALL")] == expected
    assert sql("SELECT count(*) AS n FROM steps") == [{"n": 9 * 8}]
    assert cairn("verify", "killed-3").exit_code == 0


def test_lines_are_numbered_on_after_a_restart(tmp_path: Path, make: Make) -> None:
    importer = make()
    for text in (json.dumps(verl_row("2 + 2?", "4", 1)), "no JSON", json.dumps(verl_row("2 + 2?", "5", 0)), "{"):
        with (tmp_path / "live" / "1.jsonl").open("a") as opened:
            opened.write(f"{text}\n")
        importer = make() if text == "{" else importer
        importer.once()
    assert [re.findall(r", line (\d+) is", problem) for problem in importer.problems] == [["4"]]


def test_following_takes_what_is_whole_within_a_second(tmp_path: Path, make: Make) -> None:
    ended = threading.Event()
    importer = make()
    following = threading.Thread(target=importer.follow, args=(ended,), daemon=True)
    following.start()
    try:
        _take(lines(tmp_path / "live" / "1.jsonl", verl_row("a", "1", 1)), importer, 1)
        file = tmp_path / "live" / "2.jsonl"
        row = json.dumps(verl_row("b", "2", 2, 2))
        file.write_text(f"{row}\n{row[:20]}")
        _take(file, importer, 2)
        with file.open("a") as half:
            half.write(f"{row[20:]}\n")
        _take(file, importer, 3)
    finally:
        ended.set()
        following.join(10)
    assert importer.problems == []
    assert [row["response"] for row in sql("SELECT response FROM samples ORDER BY iteration")] == ["1", "2", "2"]
    make().once()
    assert sql("SELECT count(*) AS n FROM samples") == [{"n": 3}]


def _take(file: Path, importer: Importer, samples: int) -> None:
    began = time.monotonic()
    while importer.samples < samples and time.monotonic() - began < 20:
        time.sleep(0.01)
    assert importer.samples == samples, f"{file} was not read"
    assert time.monotonic() - began < 1 + importing.SETTLED


def test_files_that_changed_after_they_were_read_are_refused(tmp_path: Path, make: Make) -> None:
    file = lines(tmp_path / "live" / "1.jsonl", verl_row("a", "1", 1), verl_row("a", "2", 2))
    make().once()
    whole = file.read_text()
    file.write_text(whole.replace('"output": "1"', '"output": "9"'))
    with pytest.raises(importing.CannotImport, match=r"has changed since its bytes 0 to \d+ became iteration 0"):
        make()
    file.write_text(whole[: len(whole) // 2])
    with pytest.raises(importing.CannotImport, match="has changed since"):
        make()
    file.unlink()  # trainers delete old files
    make().once()
    assert sql("SELECT count(*) AS n FROM samples") == [{"n": 2}]


def test_a_last_half_line_waits_for_its_end(tmp_path: Path, make: Make) -> None:
    file = tmp_path / "live" / "1.jsonl"
    row = json.dumps(verl_row("a", "1", math.pi))
    file.write_text(f"{row}\n{row[:30]}")
    first = make()
    first.once()
    assert first.problems == [f"{file}, line 2 is left out: {first.problems[0].partition(': ')[2]}"]
    assert "it waits there for the rest" in first.problems[0]
    file.write_text(f"{row}\n{row}")
    make().once()
    assert sql("SELECT iteration, reward FROM samples ORDER BY 1") == [
        {"iteration": n, "reward": pytest.approx(math.pi)} for n in (0, 1)
    ]
