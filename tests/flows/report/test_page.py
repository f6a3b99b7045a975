"""The report in a real browser: drawn, searched, coloured, and inert whatever a run holds."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, expect

from cairn.flows.iteration import iteration
from cairn.flows.report.build import Report, write_report
from cairn.flows.report.compare import compare, write_comparison
from cairn.flows.report.page import seen
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.browser import Visit, visit
from tests.flows import written_runs
from tests.flows.written_runs import new_run, write_iteration, write_run
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

HOSTILE = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'><svg onload=window.ran=3>"
    "{{ 7 * 7 }} @@curves@@</script> \u2028\u2029 \x00\x1b[31m\x7f \u202egnp.exe\u202c \u200b \U0001f9d7 שלום & &lt;"
)
ITERATIONS = 3


def written(ledger: Ledger, folder: Path) -> tuple[Report, str]:
    """The report of a run, and its URL."""
    file = folder / "report.html"
    return write_report(ledger, file, lambda what, done, of: None), file.as_uri()


@pytest.fixture(scope="module")
def real(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """The report of a run of the tiny model, whose prompts hold what a hostile data set may."""
    folder = tmp_path_factory.mktemp("real")
    rows = [
        {"prompt": f"Sort the digits {n} 2 1. {HOSTILE[:60] if n == 3 else ''}", "label": HOSTILE} for n in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    heldout = {"name": "heldout", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 8}
    config = tiny_config(
        tiny_assets,
        data={"path": str(folder / "train.jsonl")},
        algorithm={"use_rollout_logprobs": False, "use_kl_loss": True, "kl_loss_coef": 0.01},
        training={"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": 2},  # the second needs old log-probs
        eval={"eval_interval": 1, "benchmarks": [heldout]},
    )
    with tiny_context(str(folder), config) as (run, _):
        for index in range(ITERATIONS):
            iteration(run, DirectSteps(run), index)
    return written(Ledger.open(open_store(str(folder)), "tiny"), folder)


@pytest.fixture(scope="module")
def opened(real: tuple[Report, str], browser: Browser) -> Iterator[Visit]:
    with visit(browser, real[1], viewport={"width": 1440, "height": 900}, color_scheme="light") as visited:
        visited.page.locator("html[data-state=ready]").wait_for(state="attached")
        yield visited


@pytest.fixture
def page(opened: Visit) -> Page:
    """The page with nothing searched for."""
    opened.page.get_by_role("button", name="Clear").click()
    expect(opened.page.locator("#sample-count")).to_have_text(f"{16 * ITERATIONS} samples")
    return opened.page


def test_curves_are_drawn_and_arrow_keys_read_them(page: Page, real: tuple[Report, str]) -> None:
    assert (real[0].iterations, real[0].samples, real[0].findings) == (ITERATIONS, 16 * ITERATIONS, 0)
    reward = page.locator("figure").filter(has=page.get_by_role("heading", name="Reward", exact=True))
    inks = """canvas => {
        const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
        return new Set(new Uint32Array(drawn.data.buffer)).size
    }"""
    assert reward.locator("canvas").evaluate(inks) > 2, "an empty canvas has one colour"
    reward.locator(".frame").focus()
    page.keyboard.press("Home")
    expect(reward.locator(".at")).to_have_text("iteration 0")
    at_first = reward.locator("output").first.text_content()
    page.keyboard.press("ArrowRight")
    expect(reward.locator(".at")).to_have_text("iteration 1")
    assert reward.locator("output").first.text_content() != at_first
    titles = page.locator("figure h3").all_text_contents()
    assert {"Entropy", "KL divergence", "Response length", "Seconds of each iteration", "Scores"} <= set(titles)


def test_search_and_filters_leave_the_samples_that_fit(page: Page) -> None:
    total = 16 * ITERATIONS
    page.get_by_role("searchbox", name="Search").fill("sort the digits 5")
    expect(page.locator("#sample-count")).to_have_text(re.compile(rf"^\d+ of {total} samples$"))
    found = int(page.locator("#sample-count").inner_text().split()[0])
    assert 0 < found < total
    page.get_by_role("spinbutton", name="last iteration").fill("-1")
    expect(page.locator("#sample-count")).to_have_text(f"0 of {total} samples")
    expect(page.locator("#sample-table")).to_contain_text("No sample fits")


def test_tokens_are_coloured_by_what_is_asked_for_and_tell_their_values(page: Page) -> None:
    page.locator("#sample-table .tabulator-row").first.click()
    tokens = page.locator("#sample-response .token")
    assert tokens.count() > 1
    expect(page.locator("#colours li").first).to_have_text("over \u22120.1")
    styles = {}
    for colouring in ("log_prob", "log_ratio", "ref_log_ratio", "advantage", "age", "mask", ""):
        page.locator("#colouring").select_option(colouring)
        styles[colouring] = tokens.evaluate_all("all => all.map((one) => one.className).join()")
    assert "sequence-" in styles["log_prob"], "a random model is unsure of its tokens"
    assert "balance-" in styles["advantage"]
    assert "sequence-" not in styles[""]
    assert "balance-" not in styles[""]
    page.locator("#sample-response .tokens").focus()
    page.keyboard.press("Home")
    for name in ("token", "log-prob", "ratio", "advantage", "age", "weight version", "loss mask"):
        expect(page.locator("#token-card dt").get_by_text(name, exact=True)).to_be_visible()


def test_keys_go_from_sample_to_sample(page: Page) -> None:
    page.locator("#sample-table .tabulator-row").first.click()
    first = page.locator("#sample-title").inner_text()
    page.keyboard.press("j")
    expect(page.locator("#sample-title")).not_to_have_text(first)
    page.keyboard.press("k")
    expect(page.locator("#sample-title")).to_have_text(first)
    page.keyboard.press("/")
    expect(page.locator("#sample-search")).to_be_focused()


def test_a_narrow_window_shows_the_report_without_scrolling_sideways(
    browser: Browser, real: tuple[Report, str]
) -> None:
    with visit(browser, real[1], viewport={"width": 400, "height": 800}) as visited:
        visited.page.locator("html[data-state=ready]").wait_for(state="attached")
        assert visited.page.evaluate("document.documentElement.scrollWidth") == 400


def test_nothing_leaves_the_page_and_nothing_goes_wrong(page: Page, opened: Visit, real: tuple[Report, str]) -> None:
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("blob:")] == [real[1]]
    assert page.evaluate("fetch('data:text/plain,x').then(() => 'sent', () => 'refused')") == "refused"
    opened.errors.clear()  # the policy has said so on the console


def test_hostile_text_is_shown_and_runs_nothing(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = written_runs.rollout_table

    def hostile(iteration: int, groups: tuple[int, ...], version: int) -> object:
        table = usual(iteration, groups, version)
        rows = [
            row | dict.fromkeys(("prompt_text", "response_text", "label", "error"), HOSTILE)
            for row in table.to_pylist()
        ]
        return table.from_pylist(rows, table.schema)

    monkeypatch.setattr(written_runs, "rollout_table", hostile)
    ledger = new_run(str(tmp_path), data={"path": f"/data/{HOSTILE}".replace("\x00", "")})
    write_iteration(ledger, 0)
    _, url = written(ledger, tmp_path)
    with visit(browser, url) as visited:
        page = visited.page
        page.locator("html[data-state=ready]").wait_for(state="attached")
        page.get_by_role("searchbox", name="Search").fill("<svg onload")
        expect(page.locator("#sample-count")).to_have_text("6 of 6 samples")
        page.locator("#sample-table .tabulator-row").first.click()
        shown = page.locator("#sample-prompt").inner_text()
        assert "</script><script>window.ran = 1</script>" in shown
        assert "U+202E" in shown
        assert "\u202e" not in page.locator("main").inner_text()
        expect(page.locator("#configuration")).to_contain_text("<svg onload=window.ran=3>{{ 7 * 7 }}")
        assert page.evaluate("window.ran") is None
        assert visited.errors == []
        assert visited.requests == [url]


def test_two_runs_are_drawn_over_each_other(tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_run(str(tmp_path), "first")
    write_run(first, 3)
    answered = written_runs.rollout_table
    monkeypatch.setattr(
        written_runs, "rollout_table", lambda *given: with_text(answered(*given), HOSTILE if given[0] else None)
    )
    second = new_run(str(tmp_path), "second", training={"lr": 0.5})
    write_run(second, 2)
    found, histories = compare(first, second)
    assert found.parting.options == (("training.lr", first.manifest.config["training"]["lr"], 0.5),)  # type: ignore[index, call-overload]
    assert (found.iteration, found.second.until) == (1, 1)
    assert found.sample is not None
    assert (found.sample.iteration, found.sample.group_id, found.sample.responses[1]) == (1, 3, HOSTILE)
    assert {pair.name: (pair.first, pair.second) for pair in found.evaluations} == {"heldout": (0.75, 0.75)}
    file = tmp_path / "both.html"
    assert write_comparison(found, histories, first.store, file) == file.stat().st_size
    with visit(browser, file.as_uri(), viewport={"width": 1440, "height": 900}) as visited:
        page = visited.page
        page.locator("html[data-state=ready]").wait_for(state="attached")
        reward = page.locator("figure").filter(has=page.get_by_role("heading", name="Reward", exact=True))
        assert reward.locator(".legend li").all_text_contents()[1:] == ["first0.6667", "second0.6667"]
        assert reward.locator("canvas").count() == 1
        expect(page.locator("#sample mark").last).to_contain_text("</script>")
        assert page.evaluate("window.ran") is None
    assert (visited.errors, visited.requests) == ([], [file.as_uri()])


def with_text(table: pa.Table, text: str | None) -> pa.Table:
    """Return a rollout table with another first response."""
    if text is None:
        return table
    place = table.schema.get_field_index("response_text")
    texts = [text.encode(errors="replace").decode(), *table.column("response_text").to_pylist()[1:]]
    return table.set_column(place, table.schema.field(place), pa.array(texts))


def test_the_page_allows_its_own_scripts_and_no_other(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    html = (tmp_path / "report.html").read_text() if written(ledger, tmp_path) else ""
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    allowed = policy.replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*scripts, style)]
    *of_scripts, of_style = [f"'sha256-{digest}'" for digest in digests]
    assert allowed == (
        f"default-src 'none'; script-src {' '.join(of_scripts)}; style-src {of_style}; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"sourceMappingURL|<link|<iframe|(src|href)=\"(?!#)", html)


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert seen("a\x1b\u202e\u2028b\ud800") == "a⟨U+001B⟩⟨U+202E⟩⟨U+2028⟩b⟨U+D800⟩"
    assert seen("tab\tline\n\U0001f9d7 שלום") == "tab\tline\n\U0001f9d7 שלום"
