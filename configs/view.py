"""A view of a configuration that gives what its reader has declared, and raises for everything else.

What a step's commit says it was made from is then proved at every read, and not kept by hand: whoever is given a view
cannot compute on an option that its digest does not cover. A view is a section without the other options, so what its
methods and properties read is checked too.

    config = view(run_config, Reader("step filter", "`reads` in …", ("rollout.rollout_batch_size",)))
    config.rollout.rollout_batch_size     # its value
    config.rollout.num_engines            # UndeclaredRead
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cairn.configs.kinds import OPTIONS, declared, named, naming_code
from cairn.configs.schema.base import Section

CHANGES_NO_BITS: Mapping[str, str] = {
    "model": "the inputs carry the digests of the folders themselves, and the name of a teacher that a server has",
    "reward.num_workers": "graders do not see each other",
    "reward.rm_concurrency": "graders do not see each other",
    "reward.rm_api_key_env": "who asks, not what is answered",
    "reward.cache": "what is remembered is what was answered",
    "rollout.timeout": "how long is waited",
    "rollout.rollout_health_check_interval": "how long is waited",
    "rollout.rollout_health_check_timeout": "how long is waited",
    "rollout.rollout_health_check_first_wait": "how long is waited",
    "training.timeout": "how long is waited",
}
"""Options that anybody may read without saying so, and why their value changes no result."""

AnySection = TypeVar("AnySection", bound=Section)


class UndeclaredRead(Exception):
    """Somebody read an option that the digest of what it makes does not cover."""


@dataclass(frozen=True)
class Reader:
    """Who reads a configuration, and what of it."""

    name: str
    """For people: `step filter`."""
    declares_in: str
    """Where what it reads is declared."""
    reads: tuple[str, ...]
    """Options, dotted, from the root of the configuration; a section stands for all its options."""

    def may_read(self, option: str) -> bool:
        """Whether it has declared an option, or a section that the option is in."""
        return is_covered(option, self.reads) or is_covered(option, tuple(CHANGES_NO_BITS))

    def may_read_of(self, section: str) -> bool:
        """Whether it may read some option of a section."""
        return any(name.startswith(f"{section}.") for name in (*self.reads, *CHANGES_NO_BITS))

    def refuse(self, option: str) -> UndeclaredRead:
        """The error for an option that it may not read."""
        return UndeclaredRead(
            f"{self.name} reads {option} and has not declared it, so that its digests would not tell one value from "
            f"another: add it to {self.declares_in}, or to CHANGES_NO_BITS in cairn.configs.view if its value changes "
            "no result"
        )


def is_covered(option: str, names: tuple[str, ...]) -> bool:
    """Whether an option is among names, or in a section that is."""
    return any(f"{option}.".startswith(f"{name}.") for name in names)


def view(section: AnySection, reader: Reader, name: str = "") -> AnySection:
    """Returns `section` without the options that its reader may not read: reading one raises UndeclaredRead.

    Args:
        name: of the section, dotted; empty for the whole configuration.
    """
    prefix = f"{name}." if name else ""
    shown = {}
    for field, value in section:
        option = prefix + field
        if reader.may_read(option):
            shown[field] = value
        elif isinstance(value, Section) and reader.may_read_of(option):
            shown[field] = view(value, reader, option)
    return section.restricted_to(shown, partial(_refusal, reader, prefix))


def _refusal(reader: Reader, prefix: str, field: str) -> UndeclaredRead:
    return reader.refuse(prefix + field)


# What a step or an engine reads under a configuration: what it has declared, and what the user's code that it runs
# declares besides, with `cairn.plugin(reads=…)`. All of it counts in its digests.


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
