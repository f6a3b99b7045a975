"""What a process does not need while it starts: PyTorch's compiler, and looking for garbage.

The compiler is imported by who uses it, which no process of most runs ever does.
`transformers` takes one small class from it wherever it is asked for a model or a tokenizer, and it and PyTorch mark
functions for it: 1.3 s of CPU time in every process, a third of what an engine needs to start.
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

TAKEN = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The module in it that `transformers` takes its class from; it needs none of the others."""

MARKS = ("allow_in_graph", "assume_constant_result")
"""What modules call while they are imported, to tell the compiler how to take a function, which they get back."""


def defer_compiler() -> None:
    """Leave the package `torch._dynamo` for its first use: whoever imports a module of it, or asks it for more than
    what it makes of functions that are not compiled, gets the package itself. Called before `transformers` is
    imported; too late, it changes nothing."""
    if COMPILER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def collecting_later() -> Iterator[None]:
    """Look for no garbage while modules are imported, which make none: a sixth of the time that they take. What is
    there at the end is not looked through again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-in, until the compiler itself is asked for."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, Callable[..., Any]]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == TAKEN or not f"{fullname}.".startswith(f"{COMPILER}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        if fullname == COMPILER:
            spec.loader = self
        else:
            self.give_way()
            if fullname in sys.modules:  # the package has imported it by itself
                spec.loader = _Loaded()
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """All there is, is there."""

    def waits(self) -> bool:
        """Whether nobody needed the compiler yet."""
        return self in sys.meta_path

    def give_way(self) -> None:
        """Import the compiler, and tell it what it was to be told."""
        sys.meta_path.remove(self)
        del sys.modules[COMPILER]
        parent, _, name = COMPILER.rpartition(".")
        if hasattr(sys.modules[parent], name):
            delattr(sys.modules[parent], name)
        compiler = import_module(COMPILER)
        for mark, function in self.marked:
            getattr(compiler, mark)(function)


class _StandIn(ModuleType):
    """What there is of the package without importing it."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of all modules, by who looks for the source of a function
            raise AttributeError(name)
        if self._finder.waits():
            if name in MARKS:
                return partial(self._mark, name)
            if name == "disable":
                return self._disable
            if name == "graph_break":  # in a function that is not compiled
                return _nothing
            self._finder.give_way()
        return getattr(import_module(COMPILER), name)

    def _mark(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self._finder.marked.append((name, function))
        return function

    def _disable(self, function: Callable[..., Any] | None = None, *given: Any, **options: Any) -> Callable[..., Any]:
        """The function as it is for as long as there is no compiler that could meet it."""
        if function is None:
            return lambda function: self._disable(function, *given, **options)
        found: Callable[..., Any] | None = None

        @wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            nonlocal found
            if self._finder.waits():
                return function(*args, **kwargs)
            found = found or import_module(COMPILER).disable(function, *given, **options)
            return found(*args, **kwargs)

        return disabled


class _Loaded(Loader):
    """Of a module that was imported while it was looked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = sys.modules[spec.name]
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is nothing to tell yet."""
