"""What README and the documentation say can be followed: links lead somewhere, and commands are those that exist."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from markdown_it import MarkdownIt
from typer.main import get_command

import cairn
from cairn.flows.cli import app

ROOT = Path(__file__).parents[2]
FOR_AGENTS = [ROOT / "AGENTS.md", *sorted((ROOT / "skills").rglob("SKILL.md"))]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *FOR_AGENTS]
COMMAND = re.compile(r"(?:^|\s|/)cairn [a-z]")
PLACEHOLDER = re.compile(r"[A-Z][A-Z@\[\]:…]*|.*[…<>].*")
"""RUN, RUN@ITER, FOLDER: what a reader is to put something else for."""


class Link(NamedTuple):
    page: Path
    target: str


class Shown(NamedTuple):
    """A command as a page shows it."""

    page: Path
    words: tuple[str, ...]
    is_whole: bool
    """In a code block, to be typed as it is; within a sentence it may be named without its arguments."""


@cache
def tokens(page: Path) -> tuple[Any, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8")))


def links() -> Iterator[Link]:
    for page in PAGES:
        for token in tokens(page):
            for child in token.children or ():
                target = child.attrGet("href") or child.attrGet("src")
                if target and not re.match(r"[a-z]+:", target):
                    yield Link(page, target)


def commands() -> Iterator[Shown]:
    for page in PAGES:
        for token in tokens(page):
            if token.type == "fence":
                for line in token.content.replace("\\\n", " ").splitlines():
                    yield from parts_of(page, line, is_whole=True)
            for child in token.children or ():
                if child.type == "code_inline":
                    yield from parts_of(page, child.content, is_whole=False)


def parts_of(page: Path, line: str, is_whole: bool) -> Iterator[Shown]:
    """The commands of a line, without comments and what they are piped into."""
    if not COMMAND.search(line):
        return
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    for word in [*lexer, ";"]:
        if not set(word) <= set("|&;<>"):
            words.append(word)
            continue
        while words and words[0] == "$":
            words = words[1:]
        if len(words) > 1 and words[0].removeprefix(".venv/bin/") == "cairn" and words[1][0].islower():
            yield Shown(page, tuple(words[1:]), is_whole)
        words = []


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    parsed = tokens(page)
    for heading, inline in pairwise(parsed):
        if heading.type == "heading_open":
            text = "".join(child.content for child in inline.children if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
            found.add(f"{slug}-{number}" if slug in found else slug)
    return found


def problem(shown: Shown) -> str | None:
    """Why a command is none of the application's; None if it is."""
    command: Any = get_command(app)
    rest = list(shown.words)
    while rest and (commands := getattr(command, "commands", None)):
        default = getattr(command, "default", None)
        command = commands[default] if default and rest[0] not in commands else commands.get(rest.pop(0))
        if command is None:
            return f"there is no command {' '.join(shown.words[: len(shown.words) - len(rest)])}"
    context = command.context_class(command, info_name=command.name, resilient_parsing=not shown.is_whole)
    if shown.is_whole and not any(PLACEHOLDER.fullmatch(argument) for argument in rest):
        command.make_context(command.name, rest)  # types, numbers of arguments, and what is required
        return None
    # A name stands for a value: only the options are looked at.
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= set(context.help_option_names)
    for argument in rest:
        option = argument.partition("=")[0]
        if option.startswith("-") and option not in known:
            return f"{command.name} has no option {option}"
    return None


def test_the_pages_have_links_and_commands() -> None:
    assert len(list(links())) > 40
    assert len(list(commands())) > 60


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    broken = []
    for link in links():
        path, _, anchor = link.target.partition("#")
        file = (link.page.parent / path).resolve() if path else link.page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append((str(link.page.relative_to(ROOT)), link.target))
    assert broken == []


def test_every_command_and_option_shown_exists() -> None:
    wrong = {}
    for shown in commands():
        try:
            why = problem(shown)
        except Exception as error:
            why = str(error)
        if why is not None:
            wrong[str(shown.page.relative_to(ROOT)), " ".join(shown.words)] = why
    assert wrong == {}


def test_every_code_block_of_python_and_yaml_can_be_parsed() -> None:
    wrong, blocks = {}, 0
    for page in PAGES:
        for token in tokens(page):
            if token.type == "fence" and token.info.split(" ")[0] in ("python", "yaml"):
                blocks += 1
                try:
                    if token.info.startswith("python"):
                        compile(token.content, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    else:
                        yaml.safe_load(token.content)
                except (SyntaxError, yaml.YAMLError) as error:
                    wrong[str(page.relative_to(ROOT)), token.map[0] + 1] = str(error)
    assert blocks > 50
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense run", "there is no command"),
        ("import traces PATH --hat", "traces has no option --hat"),
        ("export RUN FOLDER --hat", "has no option --hat"),
        ("show run@many", "is not RUN[@ITER[/SAMPLE]]"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, why: str) -> None:
    try:
        found = problem(Shown(PAGES[0], tuple(line.split()), is_whole=True))
    except Exception as error:
        found = str(error)
    assert found is not None
    assert why in found


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_documents_what_cairn_exports(tmp_path: Path) -> None:
    subprocess.run(["make", "types"], cwd=ROOT, check=True)
    mkdocs = Path(sys.executable).with_name("mkdocs")
    built = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text("utf-8")
    for name in cairn.__all__:
        assert re.search(rf'<h2[^>]*class="doc doc-heading"[^>]*>(?:\s|<[^>]*>)*{name}\b', api), name
    for page in PAGES:
        if page.parent == ROOT / "docs":
            assert (tmp_path / page.stem / "index.html").is_file()
