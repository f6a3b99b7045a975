"""Deferral of what a process does not need while it starts: PyTorch's compiler, and garbage collection.

`transformers` imports one small class of the compiler with every model or tokenizer, and both it and PyTorch mark
functions for the compiler. Importing all of it costs 1.3 s of CPU time in every process, a third of an engine's start,
although the processes of most runs never compile. The compiler is therefore imported on first use.

To ask of PyTorch and transformers: import `torch._dynamo` where something is compiled, not where a function is marked
or a mask is made. Then this module keeps `collecting_later` alone.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"

NEEDED_MODULE = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The only module of the compiler that `transformers` imports a class from."""

MARKS = ("allow_in_graph", "assume_constant_result")
"""Functions that modules call at import to mark a function for the compiler; each returns the function."""


def defer_compiler() -> None:
    """Defer the import of the package `torch._dynamo` to its first use.

    The package is imported when code imports one of its modules, or uses more of it than the marks of functions that
    are not compiled. Call this before `transformers` is imported; afterwards it has no effect.
    """
    if COMPILER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def collecting_later() -> Iterator[None]:
    """Disable garbage collection while modules are imported: it takes a sixth of the time and finds nothing.

    Objects that exist at the end are excluded from later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Finder(MetaPathFinder, Loader):
    """Import hook that finds the stand-in until the compiler itself is needed."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, Callable[..., Any]]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NEEDED_MODULE or not f"{fullname}.".startswith(f"{COMPILER}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        if fullname == COMPILER:
            spec.loader = self
        else:
            self.import_compiler()
            if fullname in sys.modules:  # the package has imported it by itself
                spec.loader = _Loaded()
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""

    def waits(self) -> bool:
        """Return whether the compiler has not been needed yet."""
        return self in sys.meta_path

    def import_compiler(self) -> None:
        """Import the compiler, and mark the functions that were marked meanwhile."""
        sys.meta_path.remove(self)
        del sys.modules[COMPILER]
        parent, _, name = COMPILER.rpartition(".")
        if hasattr(sys.modules[parent], name):
            delattr(sys.modules[parent], name)
        compiler = import_module(COMPILER)
        for mark, function in self.marked:
            getattr(compiler, mark)(function)


class _StandIn(ModuleType):
    """The part of the package that works without importing it."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` reads these of all modules to find the source of a function
            raise AttributeError(name)
        if self._finder.waits():
            if name in MARKS:
                return partial(self._mark, name)
            if name == "disable":
                return self._disable
            if name == "graph_break":  # in a function that is not compiled
                return _nothing
            self._finder.import_compiler()
        return getattr(import_module(COMPILER), name)

    def _mark(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self._finder.marked.append((name, function))
        return function

    def _disable(self, function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return a function that calls the original until the compiler is imported, and then its disabled version."""
        if function is None:
            return lambda function: self._disable(function, *args, **options)
        disabled_function: Callable[..., Any] | None = None

        @wraps(function)
        def disabled(*inputs: Any, **kwargs: Any) -> Any:
            nonlocal disabled_function
            if self._finder.waits():
                return function(*inputs, **kwargs)
            disabled_function = disabled_function or import_module(COMPILER).disable(function, *args, **options)
            return disabled_function(*inputs, **kwargs)

        return disabled


class _Loaded(Loader):
    """Loader of a module that was imported while it was searched."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = sys.modules[spec.name]
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the compiler is not imported yet."""
