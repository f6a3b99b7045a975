"""Which source files make up user code that a configuration names, and their digest.

| module | part of the digest |
|---|---|
| the one that is named, and where the function behind decorators and `partial` is defined | yes |
| of the user's, imported by one of these, at the top or within a function, and so on | yes |
| installed, and not of the named module's own package | no: its version is part of the environment, where it counts |
| imported under a name that is only known at run time | no |

Nothing is executed to find them: imports are read from the source.
"""

import ast
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from cairn.configs.plugins import BadPlugin, load_callable, module_of, specs
from cairn.engines.processes.syntax import parsed
from cairn.storage.store import canonical

_OURS = [
    Path(folder).resolve()
    for spec in map(
        find_spec, ("cairn", *(f"cairn.{room}" for room in ("flows", "tasks", "engines", "storage", "configs")))
    )
    if spec is not None
    for folder in spec.submodule_search_locations or ()
]
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def source_digest(path: str) -> str:
    """sha256, in hex, of the source files behind the callable that `path` names: of one file its own bytes', of several
    of their module names and digests. Raises BadPlugin where the name cannot be loaded or has no source file."""
    files = source_files(path)
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return next(iter(digests.values())) if len(digests) == 1 else canonical.digest(digests)


def digest_of_all(digests: Iterable[str]) -> str:
    """Of an option that names several functions: of one, its own."""
    found = list(digests)
    return found[0] if len(found) == 1 else canonical.digest(found)


def defining_file_digest(function: Callable[..., Any]) -> str:
    """sha256, in hex, of the file that defines a callable, or its class: what the ledger calls by the option's own
    name. Raises BadPlugin if it has none."""
    function = inspect.unwrap(function)
    owner = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        file = inspect.getsourcefile(owner)
    except TypeError:
        file = None
    if file is None:
        raise BadPlugin(f"{function!r} has no Python source file: wrap it in a function of your own")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def source_files(path: str) -> dict[str, Path]:
    """The files, by name of their module; the named module itself has the name ""."""
    function = load_callable(path)
    named = module_of(path)
    first = _source(named)
    if first is None:
        raise BadPlugin(f"{function!r} has no Python source file: wrap it in a function of your own")
    package = named.__name__.partition(".")[0] if named.__spec__ and named.__spec__.parent else None
    found: dict[str, Path] = {"": first}
    pending = [(first, named.__package__ or "")]
    for module in _defining(function):
        file = _source(module)
        if file is not None and file != first and _is_users(file, module.__name__, package):
            found[module.__name__] = file
            pending.append((file, module.__package__ or ""))
    while pending:
        file, parent = pending.pop()
        for name in _imported(file, parent):
            for spec in specs(name):
                origin = Path(spec.origin).resolve() if spec.has_location and spec.origin else None
                if origin is None or origin in found.values() or not _is_users(origin, spec.name, package):
                    continue
                found[spec.name] = origin
                if origin.suffix == ".py":
                    pending.append((origin, spec.parent or ""))
    return dict(sorted(found.items()))


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _is_users(file: Path, name: str, package: str | None) -> bool:
    """Whether it is the user's own: neither Cairn's nor installed, unless with the package of what was named."""
    if package is not None and name.partition(".")[0] == package:
        return True
    return not any(map(file.is_relative_to, [*_OURS, *_INSTALLED]))


def _defining(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """The modules in which a callable and what it wraps are defined."""
    wrapped: Any = function
    while wrapped is not None:
        owner = wrapped if inspect.isroutine(wrapped) or inspect.isclass(wrapped) else type(wrapped)
        module = inspect.getmodule(owner)
        if module is not None:
            yield module
        following = wrapped.func if isinstance(wrapped, functools.partial) else getattr(wrapped, "__wrapped__", None)
        wrapped = None if following is wrapped else following


def _imported(file: Path, package: str) -> Iterator[str]:
    """Absolute names that a source file imports; of `from a import b` both `a` and `a.b`, which may be no module."""
    try:
        tree = parsed(file.read_bytes(), str(file))
    except SyntaxError:  # whoever imports it will be told
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *([node.module] if node.module else [])])
            if origin:
                yield from (f"{origin}.{alias.name}" for alias in node.names)
