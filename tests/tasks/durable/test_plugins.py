"""User code is found by name."""

import sys
from pathlib import Path

import pytest

from cairn.configs.plugins import BadPlugin, load_callable


@pytest.fixture
def code(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "custom.py").write_text(
        "LIMIT = 3\ndef double(x):\n    return 2 * x\nclass Add:\n"
        "    def __call__(self, x):\n        return x + 1\nadd = Add()\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    (tmp_path / "part.py").write_text("from . import other\n")
    (tmp_path / "script.py").write_text("def fn(x):\n    return x\nimport sys\nsys.exit(0)\n")
    (tmp_path / "cairn_test_script.py").write_text("import sys\nsys.exit('no more')\n")
    package = tmp_path / "cairn_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("cairn_test_package")]:
        del sys.modules[name]


def test_a_function_is_found_by_file_and_by_module(code):
    assert load_callable("custom.py:double")(4) == 8
    assert load_callable(f"{code}/custom.py:add")(4) == 5
    assert load_callable("cairn_test_package.inner.triple")(4) == 12


def test_files_of_one_name_in_two_folders_do_not_meet(code):
    (code / "other").mkdir()
    (code / "other" / "custom.py").write_text("def double(x):\n    return x + x + 1\n")
    assert load_callable("custom.py:double")(4) == 8
    assert load_callable("other/custom.py:double")(4) == 9


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.py:fn", r"there is no file .*absent\.py"),
        ("custom.py:absent", r"absent does not exist in .*custom\.py"),
        ("custom.py:LIMIT", r"LIMIT is not callable in .*custom\.py"),
        ("broken.py:fn", r"broken\.py cannot be loaded: .*; install no_such_module_anywhere"),
        ("raising.py:fn", r"raising\.py cannot be loaded: .*ZeroDivisionError.* at \S+raising\.py:1; correct it"),
        ("part.py:fn", r"part\.py:1; a file alone has no package: write package\.module:function"),
        ("script.py:fn", r"script\.py cannot be loaded: .*SystemExit\(0\)"),
        ("cairn_test_script.fn", r"importing cairn_test_script failed with SystemExit\('no more'\)"),
        ("no_such_package.fn", "no module named 'no_such_package'; install it"),
        ("cairn_test_package.absent.fn", "no module named 'cairn_test_package.absent'"),
        ("double", "'double' names no function: write package.module.function or file.py:function"),
        ("custom.py:", "names no function"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_way_out(code, path, message):
    with pytest.raises(BadPlugin, match=message):
        load_callable(path)
