"""The digest of user code covers every module of the user's that it rests on, and nothing else."""

import hashlib
import sys
from pathlib import Path

import pytest

from cairn.configs.plugins import BadPlugin, _load_file
from cairn.tasks.durable.plugin_sources import source_digest, source_files

FILES = {
    "grade.py": (
        "import functools, json\nfrom pathlib import Path\nimport numpy\nfrom storage.store import canonical\n"
        "from cairn_rewards import scale\nimport cairn_alone\n"
        "def grade(response, label, metadata):\n"
        "    from cairn_lazy.sub.deep import helper\n    return helper(response)\n"
        "lenient = functools.partial(scale.scaled, tolerance=0.1)\n"
    ),
    "plain.py": "import json\ndef grade(response, label, metadata):\n    return 1.0\nclass Add:\n"
    "    def __call__(self, x):\n        return x + 1\nadd = Add()\n",
    "cairn_alone.py": "VALUE = 1\n",
    "cairn_unused.py": "VALUE = 1\n",
    "cairn_lazy/sub/deep.py": "from . import sibling\ndef helper(x):\n    return sibling.ONE\n",  # no packages
    "cairn_lazy/sub/sibling.py": "ONE = 1.0\n",
    "cairn_rewards/__init__.py": "",
    "cairn_rewards/scale.py": "from .inner.table import TABLE\ndef scaled(x, tolerance):\n    return TABLE\n",
    "cairn_rewards/inner/__init__.py": "",
    "cairn_rewards/inner/table.py": "import cairn_alone\nTABLE = 1.0\n",
    "cairn_rewards/unused.py": "",
}


@pytest.fixture
def code(tmp_path: Path, monkeypatch) -> Path:
    for name, source in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    _load_file.cache_clear()


def test_one_file_has_the_digest_of_its_bytes(code):
    expected = hashlib.sha256((code / "plain.py").read_bytes()).hexdigest()
    assert source_digest("plain.py:grade") == expected
    assert source_digest("plain.py:add") == expected
    assert source_digest("plain.grade") == expected


def test_every_module_of_the_users_that_is_reached_by_an_import_counts(code):
    files = {str(file.relative_to(code)) for file in source_files("grade.py:grade").values()}
    assert files == {
        "grade.py",
        "cairn_alone.py",
        "cairn_lazy/sub/deep.py",
        "cairn_lazy/sub/sibling.py",
        "cairn_rewards/__init__.py",
        "cairn_rewards/scale.py",
        "cairn_rewards/inner/__init__.py",
        "cairn_rewards/inner/table.py",
    }


@pytest.mark.parametrize("helper", sorted(name for name in FILES if "unused" not in name and name != "plain.py"))
def test_a_changed_helper_changes_the_digest(code, helper):
    before = source_digest("grade.py:grade")
    (code / helper).write_text((code / helper).read_text() + "\n# changed\n")
    assert source_digest("grade.py:grade") != before


@pytest.mark.parametrize("other", ["cairn_unused.py", "cairn_rewards/unused.py", "plain.py"])
def test_a_module_that_nothing_imports_does_not_count(code, other):
    before = source_digest("grade.py:grade")
    (code / other).write_text("CHANGED = True\n")
    assert source_digest("grade.py:grade") == before


def test_what_a_partial_and_a_decorator_wrap_counts_beside_the_named_module(code):
    (code / "wrapping.py").write_text(
        "import functools\nimport cairn_rewards.scale as scale\n"
        "lenient = functools.partial(scale.scaled, tolerance=0.1)\n"
        "@functools.wraps(scale.scaled)\ndef strict(*a):\n    return scale.scaled(*a, tolerance=0)\n"
    )
    for name in ("lenient", "strict"):
        files = {file.name for file in source_files(f"wrapping.py:{name}").values()}
        assert {"wrapping.py", "scale.py", "table.py"} <= files


def test_the_digest_does_not_depend_on_where_the_code_lies(code, tmp_path_factory, monkeypatch):
    before = source_digest("cairn_rewards.scale.scaled")
    for name in [name for name in sys.modules if name.startswith("cairn_")]:
        del sys.modules[name]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name, source in FILES.items():
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(source)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [str(elsewhere), *(path for path in sys.path if path != str(code))])
    assert source_digest("cairn_rewards.scale.scaled") == before


def test_code_without_python_source_has_no_digest():
    with pytest.raises(BadPlugin, match="no Python source file"):
        source_digest("math.sqrt")
