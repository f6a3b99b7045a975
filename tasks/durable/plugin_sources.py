"""Source files of the user code that a configuration names, and their digest.

| module | part of the digest |
|---|---|
| the named module, and the one that defines the function behind decorators and `partial` | yes |
| a user module that one of these imports, at the top or within a function, recursively | yes |
| an installed module outside the named module's own package | no: the environment records its version where it counts |
| a user module whose dotted path is a string there, as for slime's `load_function` | yes |
| a module that is imported under another name known only at run time | no |

Imports are read from the source: nothing is executed to find them.
"""

import ast
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from cairn.configs.plugins import BadPlugin, load_callable, module_of, specs
from cairn.engines.processes.syntax import parsed
from cairn.storage.store import canonical

_CAIRN = [
    Path(folder).resolve()
    for spec in map(
        find_spec, ("cairn", *(f"cairn.{room}" for room in ("flows", "tasks", "engines", "storage", "configs")))
    )
    if spec is not None
    for folder in spec.submodule_search_locations or ()
]
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def source_digest(path: str) -> str:
    """Return the SHA-256, in hex, of the source files behind the callable that `path` names.

    For one file it is the digest of its bytes, for several the digest of their module names and digests. Raises
    BadPlugin where the name cannot be loaded or has no source file.
    """
    files = source_files(path)
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return next(iter(digests.values())) if len(digests) == 1 else canonical.digest(digests)


def digest_of_all(digests: Iterable[str]) -> str:
    """Return the digest of an option that names several functions; a single function keeps its own digest."""
    all_digests = list(digests)
    return all_digests[0] if len(all_digests) == 1 else canonical.digest(all_digests)


def require_recorded(paths: Iterable[str], recorded: str) -> None:
    """Load the functions that an option names. Raise BadPlugin where their source is no longer the recorded one, or
    where one cannot be loaded."""
    names = list(paths)
    if digest_of_all(map(source_digest, names)) != recorded:
        raise BadPlugin(
            f"the source of {' or '.join(names)} was changed while the run used it: undo the change and run "
            "`cairn resume`, or run `cairn fork` to use the new source"
        )


def load_recorded(recorded: Mapping[tuple[str, ...], str], search: Iterable[str]) -> None:
    """Do the same as `require_recorded` for several options, in a process on any machine. The process then finds
    modules in the folders `search` too, after its own ones.

    `recorded`: digests by the functions that an option names.
    """
    sys.path += [folder for folder in search if folder not in sys.path]
    for paths, digest in recorded.items():
        require_recorded(paths, digest)


def defining_file_digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256, in hex, of the file that defines a callable, or its class. The ledger records it under the
    option's own name. Raises BadPlugin if the callable has no source file."""
    function = inspect.unwrap(function)
    owner = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        file = inspect.getsourcefile(owner)
    except TypeError:
        file = None
    if file is None:
        raise _without_source(function)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def source_files(path: str) -> dict[str, Path]:
    """Return the source files by module name. The named module itself has the name ""."""
    function = load_callable(path)
    named = module_of(path)
    first = _source(named)
    if first is None:
        raise _without_source(function)
    package = named.__name__.partition(".")[0] if named.__spec__ and named.__spec__.parent else None
    files: dict[str, Path] = {"": first}
    pending = [(first, named.__package__ or "")]
    for module in _defining(function):
        file = _source(module)
        if file is not None and file != first and _is_users(file, module.__name__, package):
            files[module.__name__] = file
            pending.append((file, module.__package__ or ""))
    while pending:
        file, parent = pending.pop()
        for name in imported_names(file, parent):
            for spec in specs(name):
                origin = Path(spec.origin).resolve() if spec.has_location and spec.origin else None
                if origin is None or origin in files.values() or not _is_users(origin, spec.name, package):
                    continue
                files[spec.name] = origin
                if origin.suffix == ".py":
                    pending.append((origin, spec.parent or ""))
    return dict(sorted(files.items()))


def _without_source(function: Callable[..., Any]) -> BadPlugin:
    return BadPlugin(f"{function!r} has no Python source file: wrap it in a function of your own")


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _is_users(file: Path, name: str, package: str | None) -> bool:
    """Whether a file is the user's own: neither Cairn's nor installed, except in the package of the named module."""
    if package is not None and name.partition(".")[0] == package:
        return True
    return not any(map(file.is_relative_to, [*_CAIRN, *_INSTALLED]))


def _defining(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """Yield the modules that define a callable and what it wraps."""
    wrapped: Any = function
    while wrapped is not None:
        owner = wrapped if inspect.isroutine(wrapped) or inspect.isclass(wrapped) else type(wrapped)
        module = inspect.getmodule(owner)
        if module is not None:
            yield module
        following = wrapped.func if isinstance(wrapped, functools.partial) else getattr(wrapped, "__wrapped__", None)
        wrapped = None if following is wrapped else following


def imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield the absolute names that a source file imports, or has in a string. For `from a import b` these are `a` and
    `a.b`, which need not be a module."""
    try:
        tree = parsed(file.read_bytes(), str(file))
    except SyntaxError:  # its import reports the error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *([node.module] if node.module else [])])
            if origin:
                yield from (f"{origin}.{alias.name}" for alias in node.names)
