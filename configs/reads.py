"""What a step or an engine reads under a configuration: what it has declared, and what the user's code that it runs
declares besides, with `cairn.plugin(reads=…)`. All of it counts in its digests."""

from typing import Any

from cairn.configs.kinds import OPTIONS, declared, named, naming_code
from cairn.configs.view import is_covered


def reads_under(config: Any, reads: tuple[str, ...]) -> tuple[str, ...]:
    """`reads`, dotted, and what the user's code that some of them name declares to read of its section. `config` is a
    `RunConfig`, or as much of one as has these options. Raises BadPlugin where the code cannot be had."""
    found = list(reads)
    for option in naming_code(reads):
        section = option.rpartition(".")[0]
        for path in named(config, option).values():
            if "." in path:
                own = (f"{section}.{name}" for name in sorted(declared(OPTIONS[option].load(path)).reads))
                found += [name for name in own if not is_covered(name, tuple(found))]
    return tuple(found)
