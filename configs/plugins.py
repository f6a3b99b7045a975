"""Import of code by name: `package.module.function` on the import path, or `file.py:function`.

A file may import its neighbours, the modules in its own folder. Code that imports `slime` gets the modules of
`cairn.slime`, and for the rest those of a slime on the import path.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from cairn.configs.errors import BadInput

RELATIVE_IMPORT = re.compile(r"^\s*from \.", re.MULTILINE)
"""Statement of code that is loaded as a module of its package only, not as `file.py`."""


class BadPlugin(BadInput):
    """User code that a configuration names is not available. The message says why and what to do."""


class Unchecked(str):
    """A name of code from a store that has not passed `cairn.flows.driver.trust`. It may be shown and compared like any
    text, but is never imported."""

    __slots__ = ()


def load_callable(path: str) -> Callable[..., Any]:
    """Import the callable that `path` names.

    Raises:
        BadPlugin: there is no such file, module or name, the code fails when it is imported, or the name is not
            callable.
    """
    module = module_of(path)
    name = _split(path)[1]
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not callable" if hasattr(module, name) else "does not exist"
        place = module.__file__ or module.__name__
        raise BadPlugin(f"{path!r} cannot be loaded: {name} {what} in {place}; correct the name")
    return function


def deferred(function: Callable[..., Any]) -> str | None:
    """Return `a coroutine`, `a generator` or `an asynchronous generator` if calling a function returns one in place of
    a result; else None."""
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called):
            return "a coroutine"
        if inspect.isgeneratorfunction(called):
            return "a generator"
        if inspect.isasyncgenfunction(called):
            return "an asynchronous generator"
    return None


def module_of(path: str) -> ModuleType:
    """Import the module in which `path` names something.

    Raises BadPlugin as `load_callable` does, and for a name that is Unchecked.
    """
    if isinstance(path, Unchecked):
        raise BadPlugin(
            f"{str(path)!r} is named by a ledger, whose code is not imported: pass the recipe with `cairn train "
            "RECIPE --run NAME`"
        )
    place, name = _split(path)
    if not place or not name:
        raise BadPlugin(f"{path!r} names no function: write package.module.function or file.py:function")
    if "slime" not in sys.modules and _SLIME not in sys.meta_path:
        sys.meta_path.insert(0, _SLIME)
    return _load_file(Path(place).expanduser().resolve()) if ".py:" in path else _import_module(place, path)


def path_of(function: Callable[..., Any]) -> str | None:
    """Return the path by which another process can load a function, as from `load_callable` or an import.

    Returns None where a module has no such name, as for closures and bound methods.
    """
    name, module = getattr(function, "__qualname__", "."), sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or "." in name:
        return None
    value = getattr(module, name, None)
    if value is not function and getattr(value, "function", None) is not function:
        return None
    file = getattr(module, "__file__", None)
    if file is not None and module.__name__ == _name_of(Path(file)):
        return f"{file}:{name}"
    return f"{module.__name__}.{name}"


def code_files(path: str) -> list[Path]:
    """Return the files that run when `path` is loaded, with links resolved: its own and those of the enclosing
    packages.

    Returns none where the path cannot be loaded or is built into Python. Runs no code.
    """
    place = _split(path)[0]
    if ".py:" in path:
        return [Path(place).expanduser().resolve()]
    enclosing = list(specs(place))
    if len(enclosing) <= place.count("."):
        return []
    return [Path(spec.origin).resolve() for spec in enclosing if spec.has_location and spec.origin]


def specs(name: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module and of its enclosing packages, from the outermost inwards, as far as they exist.

    Imports none of them.
    """
    within: list[str] | None = None
    for full in accumulate(name.split("."), "{}.{}".format):
        try:
            # Search by the last name alone: for a package without a file Python would look for its parent among
            # imported modules.
            spec = find_spec(full) if within is None else PathFinder.find_spec(full.rpartition(".")[2], within)
        except ValueError:  # a module without a file, such as __main__
            return
        if spec is None:
            return
        spec.name = full
        yield spec
        within = list(spec.submodule_search_locations or ())


def _split(path: str) -> tuple[str, str]:
    """Split a path into the place of the code and its name there."""
    place, _, name = path.rpartition(":" if ":" in path else ".")
    return place, name


def _import_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BadPlugin(
            f"{path!r} cannot be loaded: no module named {error.name!r}; install it, put its folder on PYTHONPATH, "
            "or write file.py:function"
        ) from error
    # User code may raise any exception during import, and the user needs to see it.
    except (Exception, SystemExit) as error:
        raise BadPlugin(f"{path!r} cannot be loaded: importing {name} failed with {_why(error)}") from error


def _why(error: BaseException) -> str:
    """Return an error of user code that was imported, its last line there, and what to do."""
    lines = [one for one in traceback.extract_tb(error.__traceback__)[1:] if not one.filename.startswith("<frozen")]
    place = f" at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    if isinstance(error, ImportError) and __name__ in str(error):
        remedy = "a file alone has no package: write package.module:function, with the package's folder on PYTHONPATH"
    elif isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name}, or put its folder on PYTHONPATH"
    else:
        remedy = "correct it"
    return f"{error!r}{place}; {remedy}"


class _Source(SourceFileLoader):
    """Runs a file from its current source, without Python's bytecode cache.

    The cache does not notice a change within the same second that leaves the file's size the same. The code that runs
    would then differ from the recorded code.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError  # so that no bytecode is read or written


@functools.cache
def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise BadPlugin(f"there is no file {file}; correct the path of the function")
    name = _name_of(file)
    spec = _Files.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    _require_own_neighbours(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # User code may raise any exception during import, and the user needs to see it.
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BadPlugin(f"{file} cannot be loaded: running it failed with {_why(error)}") from error
    return module


def _require_own_neighbours(file: Path) -> None:
    """Raise BadPlugin where a module beside a file would be another one under its name."""
    for name in sorted(
        set(re.findall(r"^\s*(?:from|import)\s+(\w+)", file.read_text("utf-8", "replace"), re.MULTILINE))
    ):
        beside = [file.parent / f"{name}.py", file.parent / name / "__init__.py"]
        if name in sys.stdlib_module_names or not any(one.is_file() for one in beside):
            continue
        spec = find_spec(name)
        if spec is not None and spec.origin and Path(spec.origin).resolve() not in beside:
            raise BadPlugin(
                f"{file} imports {name}, which is {spec.origin} here and not the one in its own folder: rename one"
            )


def _name_of(file: Path) -> str:
    """Return a module name that is unique to the file's path, so that two files of one name do not collide.

    Any process that can import this module finds the file's module, such as a process that `multiprocessing` starts
    with a function of the file.
    """
    return f"{__name__}.{os.fsencode(file).hex()}"


_NEIGHBOURS: list[str] = []
"""Folders of the files that were loaded. They are not on the import path, where a package of such a folder would come
before a namespace package that is installed, such as `megatron`."""


class _Files(MetaPathFinder):
    """Finds modules whose names come from `_name_of`, and, after all other finders, modules beside such files."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module; None for other names. Implements `importlib.abc.MetaPathFinder`."""
        package, _, name = fullname.rpartition(".")
        if not package:
            return PathFinder.find_spec(fullname, _NEIGHBOURS)
        if package != __name__:
            return None
        try:
            file = os.fsdecode(bytes.fromhex(name))
        except ValueError:
            return None
        if (folder := os.path.dirname(file)) not in _NEIGHBOURS:
            _NEIGHBOURS.append(folder)
        return importlib.util.spec_from_file_location(fullname, file, loader=_Source(fullname, file))


class _Slime(MetaPathFinder):
    """Finds the package `slime`: Cairn's, then the folders of a slime on the import path, for modules that Cairn's
    lacks."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of the package; None for other names. Implements `importlib.abc.MetaPathFinder`."""
        if fullname != "slime":
            return None
        own = find_spec("cairn.slime")
        assert own is not None
        assert own.origin is not None
        folders = [str(Path(own.origin).parent), *(os.path.join(entry or ".", "slime") for entry in sys.path)]
        found = [folder for folder in folders if os.path.isfile(os.path.join(folder, "__init__.py"))]
        return spec_from_file_location(fullname, own.origin, submodule_search_locations=found)


_SLIME = _Slime()
__path__: list[str] = []  # the files' modules lie below this one
sys.meta_path.append(_Files())
