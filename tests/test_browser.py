"""The browser of the tests is a real one: it draws, runs scripts, and tells what went wrong and what was asked for."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser import visit

pytestmark = pytest.mark.proof

PAGE = """<!doctype html><title>A page</title><canvas width=4 height=4></canvas><p></p><script>
const brush = document.querySelector("canvas").getContext("2d")
brush.fillStyle = "rgb(1, 2, 3)"
brush.fillRect(0, 0, 4, 4)
document.querySelector("p").textContent = [...brush.getImageData(1, 1, 1, 1).data].join()
console.error("said")
fetch("http://127.0.0.1:9/asked").catch(() => undefined)
setTimeout(() => { document.title = "over"; throw new Error("thrown") })
</script>"""


def test_a_visit_shows_what_a_page_drew_said_threw_and_asked_for(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGE)
    with visit(browser, file.as_uri(), viewport={"width": 800, "height": 600}) as visited:
        visited.page.wait_for_function("document.title == 'over'")
        assert visited.page.locator("p").text_content() == "1,2,3,255"
        assert visited.page.screenshot()[:4] == b"\x89PNG"
    assert {"said", "thrown"} <= set(visited.errors)
    assert visited.requests == [file.as_uri(), "http://127.0.0.1:9/asked"]
