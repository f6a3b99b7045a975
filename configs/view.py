"""A view of a configuration: it returns the options that its reader has declared, and raises for all others.

So the inputs that a step's commit records are checked at every read: code that gets a view cannot use an option that
its digest does not cover. A view is a section without the other options, so reads by the section's methods and
properties are checked too.

    config = view(run_config, Reader("step filter", "`reads` in …", ("rollout.rollout_batch_size",)))
    config.rollout.rollout_batch_size     # its value
    config.rollout.num_engines            # UndeclaredRead
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cairn.configs.kinds import OPTIONS, code_options, declared, named, written_for_slime
from cairn.configs.schema.base import Section
from cairn.configs.slime import options_read

CHANGES_NO_BITS: Mapping[str, str] = {
    "model": "the inputs contain the digests of the folders, and the name of a teacher that a server runs",
    "reward.num_workers": "graders do not see each other",
    "reward.rm_concurrency": "graders do not see each other",
    "reward.rm_api_key_env": "it sets the account, not the response",
    "reward.cache": "a stored response equals the original response",
    "rollout.timeout": "it sets a waiting time",
    "rollout.rollout_health_check_interval": "it sets a waiting time",
    "rollout.rollout_health_check_timeout": "it sets a waiting time",
    "rollout.rollout_health_check_first_wait": "it sets a waiting time",
    "training.timeout": "it sets a waiting time",
    "training.distributed_timeout_minutes": "it sets a waiting time",
}
"""Options that any reader may read without declaring them, each with the reason why its value changes no result."""

AnySection = TypeVar("AnySection", bound=Section)


class UndeclaredRead(Exception):
    """A reader read an option that the digest of its results does not cover."""


@dataclass(frozen=True)
class Reader:
    """A reader of a configuration, with the options that it reads."""

    name: str
    """Name in messages: `step filter`."""
    declares_in: str
    """Place in the code where its options are declared, for messages."""
    reads: tuple[str, ...]
    """Dotted options from the root of the configuration; a section includes all its options."""

    def may_read(self, option: str) -> bool:
        """Whether the reader has declared an option, or a section that contains it."""
        return is_covered(option, self.reads) or is_covered(option, tuple(CHANGES_NO_BITS))

    def may_read_of(self, section: str) -> bool:
        """Whether the reader may read some option of a section."""
        return any(name.startswith(f"{section}.") for name in (*self.reads, *CHANGES_NO_BITS))


def is_covered(option: str, names: tuple[str, ...]) -> bool:
    """Whether an option, or a section that contains it, is among names."""
    return any(f"{option}.".startswith(f"{name}.") for name in names)


def view(section: AnySection, reader: Reader, name: str = "") -> AnySection:
    """Return `section` without the options that its reader may not read: reading one raises UndeclaredRead.

    Args:
        name: dotted name of the section; empty for the whole configuration.
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
    option = prefix + field
    return UndeclaredRead(
        f"{reader.name} reads {option} without declaring it, so that its digests would be the same for all its values: "
        f"add it to {reader.declares_in}, or to CHANGES_NO_BITS in cairn.configs.view if its value changes no result"
    )


def reads_under(config: Any, reads: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that a step or an engine reads: `reads`, and those that user code declares.

    The user code is the code that options of `reads` name. It declares options of its section with
    `cairn.plugin(reads=…)`; code written for slime reads those of `cairn.configs.slime`. All of them count in the
    digests.

    Args:
        config: a `RunConfig`, or an object with the sections that name the code.
        reads: dotted options.

    Raises:
        BadPlugin: the code is not available.
    """
    options = list(reads)
    for option in code_options(reads):
        section = option.rpartition(".")[0]
        for path in named(config, option).values():
            if "." in path:
                function = OPTIONS[option].load(path)
                own = [f"{section}.{name}" for name in sorted(declared(function).reads)]
                own += options_read(function) if written_for_slime(function) else ()
                options += [name for name in own if not is_covered(name, tuple(options))]
    return tuple(options)
