"""Sources are parsed whatever else the process does."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.engines.processes.syntax import parsed

SOURCE = "\n".join(f"a{i} = [{{'b': (c, d)}}, lambda e: f'{{e}}']" for i in range(100))


@contextmanager
def another_parse_at_each_collection() -> Iterator[None]:
    def parse(phase: str, info: dict[str, int]) -> None:
        ast.parse("a")

    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parse)


def test_a_collection_that_parses_something_else_breaks_no_parse() -> None:
    with another_parse_at_each_collection():
        tree = parsed(SOURCE)
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))
    assert gc.isenabled()
