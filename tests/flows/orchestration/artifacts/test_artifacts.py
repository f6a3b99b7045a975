"""What Prefect's interface shows of a run is what its ledger holds, harmless, and there exactly once."""

import os
import re
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from xml.etree import ElementTree

import httpx
import pyarrow as pa
import pytest
import yaml
from markdown_it import MarkdownIt

from cairn.flows.events import IterationDone, RunDone, RunStarted
from cairn.flows.orchestration.artifacts import publishing
from cairn.flows.orchestration.artifacts import publishing as progress
from cairn.flows.orchestration.artifacts.pages import Picked, curve, iteration_page, picked_samples, run_page
from cairn.flows.orchestration.artifacts.publishing import Pages, _finest_first, run_key
from cairn.flows.text import block, code, plain, table
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.tasks.durable.events import GroupsGenerated, Message, StepCommitted, StepStarted
from tests.background import in_background
from tests.flows.written_runs import config_of, new_run, write_run
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "```\n<b>out of the fence</b>\n```",
    "````text\n# heading",
    "[click](javascript:alert(1)) ![x](https://evil.example/pixel)",
    "| a | b |\n| --- | --- |\n| c | d |",
    "`code` ``more`` `",
    "\x1b[31mred\x07",
    "https://evil.example **bold** _it_ # no",
    "</code></pre><script>alert(2)</script>",
]


def rendered(markdown: str) -> str:
    """As an interface renders it that lets HTML through and makes links: what is dangerous would show."""
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    return str(renderer.render(markdown))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    written = new_run(str(tmp_path_factory.mktemp("store")))
    write_run(written, 2)
    return written


def read_of(ledger: Ledger) -> Any:
    def read(commit: Commit, columns: Sequence[str]) -> pa.Table:
        (output,) = commit.outputs
        return read_table(ledger.store, commit.run, output, list(columns))

    return read


def picked_of(ledger: Ledger, iteration: int = 0) -> list[Picked]:
    return picked_samples(ledger.commits(iteration), read_of(ledger))


def page_of(ledger: Ledger, iteration: int, samples: list[Picked] | None) -> str:
    return iteration_page(ledger, config_of(ledger), ledger.commits(iteration), samples)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(text: str) -> None:
    page = "\n\n".join(
        ["# Page", block(text, 1000), table(["a", "b"], [[code(text), plain(text)]]), f"{plain(text)} {code(text)}"]
    )
    html = rendered(page)
    assert not re.search(r"<(script|img|b|a|em|strong|h[2-6])\b", html), html
    assert html.count("<table>") == 1
    assert html.count("<td>") == 2
    assert html.count("<pre>") == 1
    assert "\x1b" not in html


def test_samples_and_names_on_a_page_are_harmless_and_long_ones_are_cut(ledger: Ledger) -> None:
    hostile = "".join(HOSTILE)
    sample = Picked("Best", 0, 0, 1.0, hostile * 20, "x" * 10_000, hostile, hostile)
    html = rendered(page_of(ledger, 0, [sample]))
    assert not re.search(r"<(script|img|b|a)\b", html)
    assert "… and 7,000 characters more" in html
    assert len(html) < 40_000


def test_best_median_and_worst_are_those_of_the_rewards_each_once(ledger: Ledger) -> None:
    picked = picked_of(ledger)
    # Rewards of groups 0, 1, 2 are (1, 0), (1, 0), (1, 1): sorted 1 1 1 1 0 0, of equal ones the earlier first.
    assert [(one.title, one.reward, one.group_id, one.sample_index) for one in picked] == [
        ("Best", 1.0, 0, 0),
        ("Median", 1.0, 2, 1),
        ("Worst", 0.0, 1, 1),
    ]
    assert picked[0].prompt_text == "[0] 2 + 2 ="


def test_the_page_of_an_iteration_has_its_metrics_samples_and_files(ledger: Ledger) -> None:
    page = page_of(ledger, 1, picked_of(ledger, 1))
    assert page.startswith("# `toy`, iteration 1 of 3\n\nreward **0.6667**")
    assert "| `train/grad_norm` | 2 |  |" in page
    assert "| `rollout/response_len/mean` |" in page or "| `rollout/trained/response_len/mean` | 2.5 | tokens |" in page
    assert "### Worst: reward 0" in page
    for commit in ledger.commits(1):
        for output in commit.outputs:
            assert f"{ledger.store.url}/runs/toy/{output.path}" in page
    assert "The run no longer stores them." in page_of(ledger, 1, None)


def drawn(page: str) -> tuple[list[list[str]], set[str]]:
    """Return the points of each curve of a page's picture, and its texts."""
    match = re.search(r"!\[curve\]\(data:image/svg\+xml;base64,([^)]+)\)", page)
    assert match is not None
    svg = ElementTree.fromstring(b64decode(match[1]))
    lines = [str(one.get("points")).split() for one in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    return lines, {str(one.text) for one in svg.iter("{http://www.w3.org/2000/svg}text")}


def test_the_first_points_of_a_long_curve_span_it() -> None:
    order = _finest_first(range(9999, -1, -25))[::-1]
    assert sorted(order) == list(range(24, 10_000, 25))
    assert order[0] == 9999, "the newest"
    for count in (8, 16, 64):
        shown = sorted(order[:count])
        assert max(b - a for a, b in zip([0, *shown], shown, strict=False)) <= 4 * 10_000 / count


def test_the_page_of_a_run_has_rewards_scores_and_place(ledger: Ledger) -> None:
    config, newest = config_of(ledger), ledger.find(1, Step.TRAIN)
    page = run_page(ledger, config, 2, newest, {"heldout": {0: 0.25, 2: 0.5}})
    assert f"2 of 3 iterations, weight version 2, state `{2:064x}`, in `{ledger.store.url}`." in page
    assert "| 2 | 0.5000 |" in page


def test_the_picture_has_rewards_and_scores_at_their_places() -> None:
    (reward, heldout), words = drawn(curve({0: 0.25, 1: 0.75}, {"heldout": {0: 0.25, 2: 0.5}}))
    bottom, top = 194.0, 30.0
    assert [point.split(",") for point in reward] == [["52.0", f"{bottom}"], ["232.0", f"{top}"]]
    assert [point.split(",") for point in heldout] == [["52.0", f"{bottom}"], ["412.0", f"{(top + bottom) / 2}"]]
    assert {"reward 0.75", "heldout 0.5"} <= words
    many = curve({index: index / 1000 for index in range(1000)}, {})
    assert len(many) < 5000
    ((averaged,), words) = drawn(many)
    assert len(averaged) == 59, "means of 17 iterations"
    assert "reward 0.992" in words


def test_no_two_runs_share_a_key_and_prefect_takes_every_one(tmp_path: Path) -> None:
    keys = [run_key(new_run(str(tmp_path / str(n)), name)) for n, name in enumerate(["A.b_c", "a-b-c", "a-b-c"])]
    assert len(set(keys)) == 3
    assert all(re.fullmatch(r"run-a-b-c-[0-9a-f]{12}", key) for key in keys)


class Stored:
    """A board in memory: what Prefect would hold, whoever drives."""

    def __init__(self) -> None:
        self.artifacts: dict[UUID, dict[str, Any]] = {}
        self.fails = False

    def create(self, suffix: str, type: str, data: Any, description: str, flow_run: UUID | None) -> UUID:
        self._answer()
        id = uuid4()
        self.artifacts[id] = {"suffix": suffix, "type": type, "data": data, "description": description}
        return id

    def replace(self, artifact: UUID, data: Any, description: str) -> None:
        self._answer()
        self.artifacts[artifact] |= {"data": data, "description": description}

    def descriptions(self, suffix: str) -> list[str]:
        self._answer()
        return [one["description"] for one in self.artifacts.values() if one["suffix"] == suffix]

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        if self.fails:
            raise httpx.ConnectError("connection refused")

    def of(self, suffix: str) -> list[str]:
        return [one["description"] for one in self.artifacts.values() if one["suffix"] == suffix]


class Driven:
    """The part of a RunContext that pages read."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.config, self.read, self.find = ledger, config_of(ledger), read_of(ledger), ledger.find
        self.emitted: list[Message] = []
        self.emit = self.emitted.append


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    board = Stored()
    monkeypatch.setattr(publishing, "Board", lambda key: board)
    return board


def drive(ledger: Ledger, first: int, until: int, *, done: bool = False) -> Driven:
    """A driver's events, from iteration `first` to before `until`; killed there unless it is `done`."""
    run: Any = Driven(ledger)
    pages = Pages(run)
    pages(RunStarted(ledger.run, 1, first, 3))
    for index in range(first, until):
        commits = tuple(ledger.commits(index))
        pages(IterationDone(index, commits))
    if done:
        pages(RunDone(ledger.run, until, "d" * 64))
        pages.close()
    else:
        pages.stop()
    return run


def test_after_a_kill_nothing_is_doubled_and_nothing_is_lost(ledger: Ledger, stored: Stored) -> None:
    drive(ledger, 0, 1)
    # Iteration 1 was finished by a driver that came to no page; iteration 0 is told again by the next.
    drive(ledger, 2, 2)
    drive(ledger, 0, 2, done=True)
    assert [text.partition(":")[0] for text in stored.of("-iteration")] == ["Iteration 0", "Iteration 1"]
    assert len(stored.of("")) == 3
    curve, place = stored.of("")[-1].split("\n\n")
    assert curve.startswith("![curve](data:image/svg+xml;base64,")
    assert place == "2 of 3 iterations, reward 0.667"
    assert stored.of("-progress")[-1] == "Done: 2 iterations"


def test_earlier_rewards_are_those_of_the_trained_samples_where_no_others_are_recorded(
    ledger: Ledger, stored: Stored
) -> None:
    run: Any = Driven(ledger)

    def find(iteration: int, step: Step, shard: str | None = None) -> Commit | None:
        commit = ledger.find(iteration, step, shard)
        return commit.model_copy(update={"metrics": {}}) if commit is not None and step is Step.FILTER else commit

    run.find = find
    pages = Pages(run)
    pages(RunStarted(ledger.run, 1, 2, 3))
    assert pages._rewards == {0: 0.5, 1: 0.5}
    pages.stop()


def test_a_silent_prefect_is_told_once_and_gets_what_is_owed_later(ledger: Ledger, stored: Stored) -> None:
    run: Any = Driven(ledger)
    pages = Pages(run)
    stored.fails = True
    pages(RunStarted(ledger.run, 1, 0, 3))
    pages(IterationDone(0, tuple(ledger.commits(0))))
    assert stored.artifacts == {}
    assert len(run.emitted) == 1
    assert "connection refused" in run.emitted[0].text
    stored.fails = False
    pages(IterationDone(1, tuple(ledger.commits(1))))
    pages(RunDone(ledger.run, 2, "d" * 64))
    assert [text.partition(":")[0] for text in stored.of("-iteration")] == ["Iteration 0", "Iteration 1"]
    assert len(run.emitted) == 1


def test_progress_names_step_and_groups_and_is_sent_at_most_every_interval(
    ledger: Ledger, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 60.0)
    sent: list[tuple[float, str]] = []
    run: Any = Driven(ledger)
    pages = Pages(run)

    def replace_progress(artifact: UUID, data: float, description: str) -> None:
        if stored.artifacts[artifact]["suffix"] == "-progress":
            sent.append((data, description))

    monkeypatch.setattr(stored, "replace", replace_progress)
    pages(RunStarted(ledger.run, 1, 0, 3))
    rollouts = [commit for commit in ledger.commits(0) if commit.step is Step.ROLLOUT]
    for shard, (groups, total) in {"00-000": (1, 2), "00-001": (0, 1)}.items():
        pages(StepStarted(0, Step.ROLLOUT, shard))
        pages(GroupsGenerated(0, shard, groups, total))
    wait_for(lambda: len(stored.of("-progress")) == 1)
    assert str(pages._now) == "Iteration 0: rollout; 1 of 3 groups generated"
    pages(StepCommitted(rollouts[0]))
    pages(StepStarted(0, Step.FILTER, "00"))
    assert str(pages._now) == "Iteration 0: rollout, filter; 2 of 3 groups generated"
    assert sent == []
    pages(RunDone(ledger.run, 2, "d" * 64))
    assert sent == [(100.0, "Done: 0 iterations")]
    pages.stop()


def artifacts_of(api_url: str, key: str) -> list[dict[str, Any]]:
    """In the order in which they were made."""
    requested = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
    found = httpx.post(f"{api_url}/artifacts/filter", json=requested, timeout=60).json()
    return list(reversed(found))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_killed_and_resumed_has_one_page_an_iteration_in_prefect(
    tiny_assets: Path, tmp_path: Path, api_url: str
) -> None:
    iterations, store = 6, str(tmp_path / "store")
    config = tiny_config(tiny_assets, rollout={"num_rollout": iterations})
    recipe = tmp_path / "killed.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    cairn = Path(sys.executable).with_name("cairn")
    with in_background(cairn, "train", recipe, "--store", store, PREFECT_API_URL=api_url) as driver:
        manifest = tmp_path / "store" / "runs" / "killed" / "run.json"
        wait_for(manifest.exists)
        key = run_key(Ledger.open(open_store(store), "killed"))
        wait_for(lambda: len(artifacts_of(api_url, f"{key}-iteration")) >= 2)
        driver.send_signal(signal.SIGKILL)
    assert len(artifacts_of(api_url, f"{key}-iteration")) < iterations
    command = [cairn, "resume", "killed", "--store", store]
    environment = os.environ | {"PREFECT_API_URL": api_url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    pages = artifacts_of(api_url, f"{key}-iteration")
    described = [f"Iteration {index}: reward " for index in range(iterations)]
    assert [page["description"][: len(start)] for page, start in zip(pages, described, strict=True)] == described
    names = []
    for page in pages:
        assert page["data"].startswith(f"# `killed`, iteration {len(names)} of {iterations}")
        names.append(httpx.get(f"{api_url}/flow_runs/{page['flow_run_id']}", timeout=60).json()["name"])
    assert names[-1] == f"killed {iterations - 1:06d}"
    runs = artifacts_of(api_url, key)
    assert len(runs) == 2
    assert f"{iterations} of {iterations} iterations" in runs[-1]["data"]
    progress_bars = artifacts_of(api_url, f"{key}-progress")
    assert [bar["type"] for bar in progress_bars] == ["progress", "progress"]
    assert (progress_bars[-1]["data"], progress_bars[-1]["description"]) == (100.0, f"Done: {iterations} iterations")
    assert runs[-1]["flow_run_id"] == progress_bars[-1]["flow_run_id"] != runs[0]["flow_run_id"]
