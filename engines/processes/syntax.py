"""Python sources as trees."""

import ast
import gc


def parsed(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """What `ast.parse` returns, also where another thread parses, or the garbage collector runs what does.

    Python before 3.11.8 and 3.12.2 counts the depth of a tree in one place of the process, and raises SystemError where
    a collection amid the parse lets another one begin (https://github.com/python/cpython/issues/106905).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source, name)
    finally:
        if collecting:
            gc.enable()
