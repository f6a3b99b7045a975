"""Parsing of Python sources into syntax trees."""

import ast
import gc


def parsed(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """Return `ast.parse(source, name)`, safe against other threads that parse and against the garbage collector.

    Before 3.11.8 and 3.12.2, Python counts the depth of a tree in one variable of the process. It raises SystemError
    where a garbage collection during parsing starts another parse (https://github.com/python/cpython/issues/106905).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source, name)
    finally:
        if collecting:
            gc.enable()
