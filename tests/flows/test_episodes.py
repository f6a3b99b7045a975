"""Episodes to look at: shown turn by turn, asked by SQL, run again from the record, exported, redacted."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atif
import pyarrow.compute as pc
import pytest
from playwright.sync_api import Browser, expect
from typer.testing import CliRunner

from cairn.configs.plugins import _load_file
from cairn.flows.cli import app
from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import iteration_metrics
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_recorded_table
from cairn.storage.logs.call_log import calls_of
from cairn.storage.opening import open_store
from cairn.storage.query.database import open_query
from cairn.storage.upkeep.redaction import redact
from cairn.storage.upkeep.verification import verify
from tests.browser import visit
from tests.commands import cairn
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

CALLED = """
import asyncio
from dataclasses import replace
from pathlib import Path

import cairn


@cairn.tool(kind="effects", reconcile=lambda intent: cairn.NOT_DONE)
async def look_up(number: int) -> str:
    with open(Path(__file__).with_name("called"), "a") as file:
        file.write("x")
    if number == 1:
        raise ValueError(f"nothing under {number}")
    return "Sort the digits" if number == 0 else "1 2 3 " * 300


def half(response, label, metadata):
    return 0.5


async def generate(ctx, sample):
    ctx.now()
    first = replace(await ctx.sample(sample.prompt_ids, max_new_tokens=6), reward=0.25)
    for number in range(3):
        try:
            said = await ctx.call(look_up, {"number": number})
        except cairn.ToolFailed:
            continue
    given = cairn.Segment.given(ctx.tokenizer.encode("Sort the digits", add_special_tokens=False))
    before = [*sample.prompt_ids, *first.ids, *given.ids]
    answers = await asyncio.gather(*(ctx.sample(before, max_new_tokens=4 + i) for i in range(2)))
    await ctx.judge(half, "a word")
    chosen = answers[ctx.random().randrange(2)]
    note = cairn.Segment.given(chosen.ids[-2:])
    last = await ctx.sample([*sample.prompt_ids, *note.ids])
    return [cairn.Trajectory([first, given, chosen]), cairn.Trajectory([note, last])]
"""
SAMPLES, TOOLS = 4, 3


@pytest.fixture(scope="module")
def agent(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run's code, with its store: an agent that calls a tool thrice, of which once in vain, asks twice
    at a time, and goes on with one answer in a trajectory of its own."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent.py").write_text(CALLED)
    option = {
        "custom_generate_function_path": f"{folder / 'agent.py'}:generate",
        "num_rollout": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
    }
    with tiny_context(str(folder / "store"), tiny_config(tiny_assets, rollout=option)) as (run, _):
        iteration(run, DirectSteps(run), 0)
    return folder


@pytest.fixture
def here(agent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a store may name the agent's code; what the test does to that is undone."""
    monkeypatch.chdir(agent)
    monkeypatch.setenv("CAIRN_STORE", "store")
    yield agent
    change(agent)


def change(folder: Path, old: str = "", new: str = "") -> None:
    """Write the agent's code with something else in it, for a process that has not read it yet."""
    (folder / "agent.py").write_text(CALLED.replace(old, new) if old else CALLED)
    _load_file.cache_clear()


def rollout(folder: Path) -> tuple[Ledger, Commit]:
    ledger = Ledger.open(open_store(str(folder / "store")), "tiny")
    commit = ledger.find(0, Step.ROLLOUT, "00-000")
    assert commit is not None
    return ledger, commit


def row_of(folder: Path, group: int, index: int) -> dict[str, Any]:
    ledger, commit = rollout(folder)
    table = read_recorded_table(ledger.store, "tiny", commit.table)
    (row,) = table.filter((pc.field("group_id") == group) & (pc.field("sample_index") == index)).to_pylist()
    return row


def test_an_episode_is_shown_turn_by_turn_with_its_calls(here: Path) -> None:
    result = cairn("show", "tiny@0/3", "--json")
    (view,) = json.loads(result.stdout)
    row, episode = row_of(here, 1, 1), view["episode"]
    first, second = episode["trajectories"]
    (first_turn, answered), (noted,) = first["turns"], second["turns"]
    assert [call["kind"] for call in episode["opening"]] == ["now"]
    assert (first_turn["world"], first_turn["reward"], answered["reward"]) == (None, 0.25, None)
    assert (first["reward"], second["reward"]) == (0.25, None)
    assert [(call["call"], call["kind"], call["name"]) for call in first_turn["calls"]] == [
        (f"c{number}", "tool", "look_up") for number in range(TOOLS)
    ]
    assert [json.loads(call["arguments"]) for call in first_turn["calls"]] == [{"number": n} for n in range(TOOLS)]
    results = [call["result"] and json.loads(call["result"]) for call in first_turn["calls"]]
    assert results == ["Sort the digits", None, "1 2 3 " * 300]
    assert "nothing under 1" in first_turn["calls"][1]["error"]
    assert [call["result_digest"] is None for call in first_turn["calls"]] == [True, True, False]
    assert answered["world"]["text"] == "Sort the digits"
    ids = [*first_turn["answer"]["ids"], *answered["world"]["ids"], *answered["answer"]["ids"]]
    ids += [*noted["world"]["ids"], *noted["answer"]["ids"]]
    assert ids == row["response_ids"]
    prompt, lengths = len(row["prompt_ids"]), [6, len(answered["world"]["ids"]), 2]
    inputs = [turn["answer"]["given_tokens"] for turn in (first_turn, answered, noted)]
    assert inputs == [prompt, prompt + lengths[0] + lengths[1], prompt + lengths[2]]
    (unused,) = episode["unused"]
    both = {unused["answer"]["call"], answered["answer"]["call"]}
    assert both == {"t0.0", "t1.0"}
    assert len(unused["answer"]["ids"]) == {"t0.0": 4, "t1.0": 5}[unused["answer"]["call"]]
    assert [call["kind"] for turn in (answered, unused) for call in turn["calls"]] == ["judge"]
    began = [turn["answer"]["began_at"] for turn in (first_turn, answered, noted)]
    assert began == sorted(began)
    assert all(turn["answer"]["seconds"] > 0 for turn in (first_turn, answered, noted))

    text = cairn("show", "tiny@0/3").stdout
    for said in (
        "trajectory 0 of 2, reward 0.250", "tool look_up call c1", '{"number":2}',
        "✗ look_up: ValueError: nothing under 1",
        f"6 tokens after {prompt}", "answers that are in no trajectory", "judge half call j0",
        first_turn["calls"][2]["result_digest"],
    ):  # fmt: skip
        assert said in text, said


def test_one_episode_is_shown_by_its_group_and_index_too(here: Path) -> None:
    assert cairn("episode", "tiny@0/1/1").stdout == cairn("show", "tiny@0/3").stdout


def test_calls_can_be_asked_for_by_sql(here: Path) -> None:
    query = open_query(open_store("store"), "tiny")
    found = query.sql(
        'SELECT call, kind, name, turn, used, sampled_tokens, len(result), error IS NULL FROM calls WHERE group_id = 1 '
        'AND sample_index = 1 ORDER BY "order"'
    )  # fmt: skip
    rows = [tuple(row.values()) for row in found.to_pylist()]
    assert rows[:5] == [
        ("n0", "now", "", 0, None, None, rows[0][6], True),
        ("0", "sample", "", 0, True, 6, None, True),
        ("c0", "tool", "look_up", 1, None, None, 17, True),
        ("c1", "tool", "look_up", 1, None, None, None, False),
        ("c2", "tool", "look_up", 1, None, None, 1802, True),
    ]
    assert {row[0]: row[5] for row in rows[5:7]} == {"t0.0": 4, "t1.0": 5}
    assert sorted(row[4] for row in rows[5:7]) == [False, True]
    assert (rows[7][1], rows[7][2], rows[7][6]) == ("judge", "half", 3)
    whole = "SELECT count(*), count(DISTINCT call) FROM calls WHERE kind = 'tool'"
    assert [*query.sql(whole).to_pylist()[0].values()] == [SAMPLES * TOOLS, TOOLS]


def test_a_rollout_counts_calls_and_failures(here: Path) -> None:
    ledger, commit = rollout(here)
    metrics = {
        name: commit.metrics[name] for name in ("policy_calls", "policy_calls/max", "tool_calls", "tool_failures")
    }
    assert metrics == {
        "policy_calls": 4 * SAMPLES,
        "policy_calls/max": 4,
        "tool_calls": TOOLS * SAMPLES,
        "tool_failures": SAMPLES,
    }
    assert commit.metrics["tool_failures/look_up"] == SAMPLES
    calls = calls_of(ledger.store, commit, {0, 1})
    assert commit.metrics["tool_seconds"] == pytest.approx(sum(c["seconds"] for c in calls if c["kind"] == "tool"))
    inputs = sum(
        segment["tokens"]
        for row in read_recorded_table(ledger.store, "tiny", commit.table).to_pylist()
        for segment in row["segments"]
        if segment["call"] is None
    )
    shown = iteration_metrics(ledger.commits(0), tiny_config(here))
    assert shown["rollout/policy_calls/mean"] == 4
    assert shown["rollout/world_tokens"] == inputs
    assert shown["rollout/world_tokens_ratio"] == inputs / shown["rollout/response_tokens"]


def test_the_code_runs_again_from_the_record_and_calls_nothing(here: Path) -> None:
    called = (here / "called").read_text()
    assert len(called) == TOOLS * SAMPLES
    result = cairn("episode", "tiny@0/1/1", "--replay")
    assert result.exit_code == 0, result.output
    assert "the same trajectory, bit for bit, after 9 answers" in result.stdout
    assert result.stdout.index("tool look_up call c2") < result.stdout.index("judge half call j0")
    results = json.loads(cairn("episode", "tiny@0/3", "--replay", "--json").stdout)
    assert results == {"outcome": "same", "told": "", "changed": False, "answers": 9}
    assert (here / "called").read_text() == called


@pytest.mark.parametrize(
    ("code", "outcome", "message"),
    [
        (("chosen.ids[-2:]", "chosen.ids[-3:]"), "diverged", "makes call 1 .sample. after .* other tokens"),
        (('{"number": number}', '{"number": number + 1}'), "diverged", "look_up.* with .*1.* where .*0.* is recorded"),
        (('await ctx.judge(half, "a word")', "pass"), "diverged",
         r"the code waits for 1, but has not made call j0 \(judge half\) with .*, recorded before that"),
        (("ctx.now()", "ctx.now(); ctx.now()"), "diverged",
         r"call n1 \(now\) is not in the record: a replay makes no new calls"),
        (("return [", "first.loss_mask[0] = 0; return ["), "differs",
         "segment 0 of trajectory 0 differs first at its token 0: the loss mask is 0, but 1 is committed"),
        (("return [", "return 1 / 0; ["), "failed", "generate: ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_changed_code_is_told_and_where_it_first_differs(
    here: Path, code: tuple[str, str], outcome: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.engines.agents.episodes.offline.STUCK", 0.2)
    change(here, *code)
    result = cairn("episode", "tiny@0/3", "--replay", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["outcome"], found["changed"]) == (outcome, True)
    assert re.search(message, found["told"]), found["told"]


def test_a_debugger_stops_at_the_first_line_and_at_an_error(here: Path) -> None:
    change(here, "    chosen = ", "    1 / 0\n    chosen = ")
    typed = "p 'prompt of', len(sample.prompt_ids)\nc\np 'answers', [len(a.ids) for a in answers]\nq\n"
    result = CliRunner().invoke(app, ["episode", "tiny@0/3", "--replay", "--pdb"], input=typed)
    prompt = len(row_of(here, 1, 1)["prompt_ids"])
    assert f"('prompt of', {prompt})" in result.stdout
    assert "-> ctx.now()" in result.stdout
    assert "-> 1 / 0" in result.stdout
    assert "('answers', [4, 5])" in result.stdout
    assert "no trajectory: generate: ZeroDivisionError" in result.stdout
    assert "has changed since the run" in result.stderr
    assert result.exit_code == 1


def test_code_that_a_store_names_elsewhere_is_not_run(here: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = cairn("episode", "tiny@0/3", "--replay", "--store", str(here / "store"))
    assert result.exit_code == 2
    assert "a store may not name code outside the working folder" in result.output


@pytest.mark.parametrize(
    ("place", "message"),
    [("9", "has samples 0 to 3, not 9"), ("1/7", "has no sample 7 of group 1"), ("one", "'tiny@0/one' is not RUN")],
)
def test_a_sample_that_is_not_there_is_named(here: Path, place: str, message: str) -> None:
    result = cairn("episode", f"tiny@0/{place}")
    assert result.exit_code == 2
    assert message in result.output


def test_samples_are_exported_as_trajectories_that_the_formats_own_models_take(here: Path, tmp_path: Path) -> None:
    result = cairn("export", "tiny@0", str(tmp_path / "out"), "--format", "atif")
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 2 * SAMPLES
    found = {file.stem: atif.Trajectory.model_validate_json(file.read_text()) for file in files}
    row = row_of(here, 1, 1)
    first, second = found["000001-001.0"], found["000001-001.1"]
    assert first.session_id == second.session_id == "tiny@0/1/1"
    prompt, opening, first_turn, answered = first.steps[0], None, *first.steps[1:]
    assert (prompt.source, prompt.message) == ("user", row["prompt_text"])
    assert opening is None, "the clock is no tool"
    assert first_turn.metrics.prompt_token_ids == row["prompt_ids"]
    assert first_turn.metrics.completion_token_ids == row["response_ids"][:6]
    assert first_turn.metrics.logprobs == row["log_probs"][:6]
    assert [call.tool_call_id for call in first_turn.tool_calls] == ["c0", "c1", "c2"]
    assert first_turn.tool_calls[2].arguments == {"number": 2}
    contents = [one.content for one in first_turn.observation.results]
    assert (contents[0], contents[2]) == ("Sort the digits", "1 2 3 " * 300)
    assert "nothing under 1" in contents[1]
    end = row["trajectories"][0]
    whole = [*answered.metrics.prompt_token_ids, *answered.metrics.completion_token_ids]
    assert whole == row["prompt_ids"] + row["response_ids"][:end]
    noted = second.steps[-1]
    whole = [*noted.metrics.prompt_token_ids, *noted.metrics.completion_token_ids]
    assert whole == row["prompt_ids"] + row["response_ids"][end:]
    assert second.steps[1].source == "user", "what the world gave where no tool was called"
    imported = cairn("import", "traces", str(tmp_path / "out"), "--store", str(tmp_path / "imported"))
    assert imported.exit_code == 0, imported.output
    again = Ledger.open(open_store(str(tmp_path / "imported")), "out").find(0, Step.ROLLOUT, "00-000")
    assert again is not None
    back = read_recorded_table(open_store(str(tmp_path / "imported")), "out", again.table).to_pylist()
    same = ("prompt_ids", "response_ids", "log_probs", "loss_mask", "weight_versions", "trajectories", "label")
    assert len(back) == SAMPLES
    assert {name: back[3][name] for name in same} == {name: row[name] for name in same}
    repeated = cairn("export", "tiny@0", str(tmp_path / "out"), "--format", "atif")
    assert repeated.exit_code == 2
    assert "is not empty: use a new folder" in repeated.output


def test_arguments_and_results_of_a_redacted_prompt_are_gone(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "store", tmp_path / "store")
    ledger, commit = rollout(tmp_path)
    prompt = row_of(tmp_path, 1, 1)["prompt_index"]
    calls = {row["call"]: row for row in calls_of(ledger.store, commit, {1})}
    redact(ledger, prompt, by="ada", why="asked")
    assert not [finding for one in verify(ledger) for finding in one.findings]
    left = {row["call"]: row for row in calls_of(ledger.store, commit, {1})}
    assert left.keys() == calls.keys(), "rows stay"
    for row in left.values():
        columns = ("arguments", "result", "result_digest", "response_ids", "log_probs")
        assert not any(row[name] for name in (*columns, "arguments_digest"))
        assert row["error"] == "redacted"
    others = calls_of(ledger.store, commit, {0})
    assert [row["result"] for row in others if row["call"] == "c2"] == [json.dumps("1 2 3 " * 300)] * 2
    (_, commit) = rollout(tmp_path)
    assert commit.side_file(CALLS_FILE) is not None
    redact(ledger, row_of(tmp_path, 0, 0)["prompt_index"], by="ada", why="asked")
    output = commit.side_file(RESULTS_FILE)
    assert output is not None
    assert read_recorded_table(ledger.store, "tiny", output).num_rows == 0, "a result that no other prompt has goes"
    refused = cairn("episode", "tiny@0/3", "--replay", "--store", str(tmp_path / "store"))
    assert "has redacted samples of 000000/rollout.00-000: its record is incomplete" in refused.output


@pytest.mark.slow
def test_a_report_shows_the_turns_of_a_sample_with_its_calls_folded(
    here: Path, tmp_path: Path, browser: Browser
) -> None:
    result = cairn("report", "tiny", str(tmp_path / "report.html"), "--no-verify")
    assert result.exit_code == 0, result.output
    with visit(browser, (tmp_path / "report.html").as_uri()) as visited:
        turns = visited.page.locator("#sample-turns")
        calls = turns.locator("details")
        expect(calls.locator("summary strong")).to_have_text(["now", *["tool look_up"] * TOOLS, "judge half"])
        expect(calls.nth(3).locator(".plain").first).to_be_hidden()
        calls.nth(3).locator("summary").click()
        expect(calls.nth(3).locator(".plain").first).to_have_text('{"number":2}')
        expect(calls.nth(3)).to_contain_text("sha256 ")
        expect(turns).to_contain_text("6 tokens after ")
