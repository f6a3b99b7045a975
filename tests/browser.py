"""A real browser for tests: headless Chromium from Debian's packages, driven by Playwright.

The browser that is on the PATH is taken, else `chromium-headless-shell` is downloaded with apt (about 60 MB), unpacked
into a folder that stays, and run from there. Needs Debian or Ubuntu where none is installed; needs no root rights.

    def test_the_page_says_hello(browser: Browser) -> None:
        with visit(browser, "http://127.0.0.1:8000/") as visited:
            visited.page.get_by_role("heading", name="Hello").wait_for()
        assert visited.errors == []

While a module's browser lives, the module's own thread counts as one with a running event loop: `asyncio.run` and
Prefect's synchronous calls belong into another thread or process.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.debian import unpacked

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PACKAGES = Path(__file__).parents[1] / "build" / "chromium"
"""Folder of the unpacked packages."""
_NAMES = ["chromium-headless-shell", "fonts-inter", "fonts-dejavu-core"]
_INSTALLED = ("chromium-headless-shell", "chromium", "google-chrome")
_FONTS = (
    ("system-ui", "Inter"), ("sans-serif", "Inter"), ("serif", "DejaVu Serif"), ("monospace", "DejaVu Sans Mono")
)  # fmt: skip
REBOUND = "rebound.test"
"""A name that leads the browser to this machine, as its owner may have pointed it here."""
_DEADLINE = 30_000  # milliseconds until Playwright gives up on what a test waits for: a busy machine is slow


@dataclass
class Visit:
    """One page, and what happened on it since it was opened."""

    page: "Page"
    errors: list[str] = field(default_factory=list)
    """Messages of level error on its console, and exceptions that nothing caught."""
    requests: list[str] = field(default_factory=list)
    """URLs that it requested, its own among them."""


def executable(folder: Path = PACKAGES) -> tuple[Path, dict[str, str]]:
    """Return a Chromium and its environment. Raises RuntimeError where none is installed and apt has none."""
    for name in _INSTALLED:
        if found := shutil.which(name):
            return Path(found), {}
    root = unpacked(_NAMES, folder)
    libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    fonts = folder / "fonts.conf"
    places = ["/usr/share/fonts", root / "usr" / "share" / "fonts"]
    fonts.write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd"><fontconfig>'
        + "".join(f"<dir>{place}</dir>" for place in places)
        + "".join(
            f"<alias><family>{kind}</family><prefer><family>{font}</family></prefer></alias>" for kind, font in _FONTS
        )
        + f"<cachedir>{folder / 'fonts'}</cachedir></fontconfig>"
    )
    environment = {
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio:{libraries}/nss",
        "FONTCONFIG_FILE": str(fonts),
    }
    return root / "usr" / "lib" / "chromium" / "chromium-headless-shell", environment


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The module's browser."""
    from playwright.sync_api import sync_playwright  # tests without it need not wait for it

    try:
        program, environment = executable()
    except RuntimeError as reason:
        pytest.skip(str(reason))
    with sync_playwright() as playwright:
        # Its sandbox needs rights that a container seldom has; what it shows comes from the tests alone.
        started = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"],
            env={**os.environ, **environment},
        )
        yield started
        started.close()


@contextmanager
def visit(browser: "Browser", url: str, **options: Any) -> Iterator[Visit]:
    """Open a page in a profile of its own. `options` are those of Playwright's `Browser.new_context`."""
    context = browser.new_context(**options)
    context.set_default_timeout(_DEADLINE)
    try:
        visited = Visit(context.new_page())
        visited.page.on(
            "console", lambda message: visited.errors.append(message.text) if message.type == "error" else None
        )
        visited.page.on("pageerror", lambda error: visited.errors.append(str(error)))
        visited.page.on("request", lambda request: visited.requests.append(request.url))
        visited.page.goto(url)
        yield visited
    finally:
        context.close()
