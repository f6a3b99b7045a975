"""AGENTS.md and the skills have the form that agents load, and what they say to do can be done."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.docs.test_pages import FOR_AGENTS, ROOT, tokens
from tests.examples.conftest import root  # noqa: F401  (a fixture)
from tests.examples.tutorial import follow

SKILLS = [page for page in FOR_AGENTS if page.name == "SKILL.md"]


def test_skills_have_the_front_matter_of_the_agent_skills_specification() -> None:
    assert SKILLS
    for page in SKILLS:
        match = re.match(r"---\n(.*?)\n---\n", page.read_text(), re.DOTALL)
        assert match is not None, page
        front = yaml.safe_load(match[1])
        assert front["name"] == page.parent.name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
        assert 0 < len(front["description"]) <= 1024
        assert len(front["compatibility"]) <= 500
        assert front.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
        assert len(page.read_text().splitlines()) < 500


def test_the_commands_of_agents_md_name_what_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line for token in tokens(FOR_AGENTS[0]) if token.type == "fence" for line in token.content.splitlines()]
    assert len(lines) > 5
    for line in lines:
        for command in line.partition("#")[0].split("&&"):
            program, *words = shlex.split(command)
            if program == "make":
                assert set(words) <= set(targets), line
            else:
                assert program.removeprefix(".venv/bin/") in ("python", "ruff", "mypy"), line
                paths = [word for word in words if "/" in word]
                assert all((ROOT / path).exists() for path in paths), line


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SKILLS, ids=lambda page: page.parent.name)
def test_every_command_of_a_skill_works_as_it_is_written(root: Path, page: Path) -> None:  # noqa: F811
    said: dict[str, str] = {}
    for command, done in follow(root, page):
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command] = done.stdout + done.stderr
    told = "\n".join(said.values())
    assert "sort.yaml is fine" in told
    assert "run sort: done; weight version 2" in told
    assert "every byte is what was committed" in told
    assert "32 samples of run again get another reward" in told
    assert {line.split("'reward': ")[0] for line in said["python read.py"].splitlines()} == {
        "{'iteration': 0, ", "{'iteration': 1, "
    }  # fmt: skip
