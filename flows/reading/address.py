"""Addresses of what a store holds: `RUN`, `RUN@ITER` and `RUN@ITER/SAMPLE`, where SAMPLE is N or GROUP/INDEX.

Without ITER an address means the newest iteration that has what a command shows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.configs.errors import BadInput
from cairn.storage.ledger.layout import LAST_NUMBER

if TYPE_CHECKING:
    from cairn.flows.reading.samples import SampleView
    from cairn.storage.ledger.commits import Commit, Step
    from cairn.storage.ledger.ledger import Ledger

_NUMBER = "[0-9]{1,20}"
_FORM = re.compile(
    rf"(?P<run>[^@]+)(?:@(?P<iteration>{_NUMBER})(?:/(?P<sample>{_NUMBER})(?:/(?P<index>{_NUMBER}))?)?)?"
)
_LAST_ID = 2**63 - 1
"""Maximum of an integer column of a table."""


@dataclass(frozen=True)
class Address:
    """A run, an iteration of it, or a sample of the iteration."""

    run: str
    iteration: int | None = None
    sample: tuple[int, ...] | None = None
    """The sample's number in the iteration, or its group and its index in the group."""

    def __str__(self) -> str:
        parts = [self.run] if self.iteration is None else [f"{self.run}@{self.iteration}", *map(str, self.sample or ())]
        return "/".join(parts)


def parser(form: str, *, sample: bool = False) -> Callable[[str], Address]:
    """Return the function that parses an argument of a command.

    Args:
        form: what the command takes, for the error: `RUN[@ITER]`.
        sample: whether the address may name a sample.
    """

    def parse(text: str) -> Address:
        match = _FORM.fullmatch(text)
        if match is None or (match["sample"] and not sample):
            raise BadInput(f"{text!r} is not {form}, such as quickstart@19{'/3' if sample else ''}")
        iteration = None if match["iteration"] is None else int(match["iteration"])
        if iteration is not None and iteration > LAST_NUMBER:
            raise BadInput(f"{text!r}: an iteration is a number from 0 to {LAST_NUMBER}")
        numbers = tuple(int(match[part]) for part in ("sample", "index") if match[part])
        if any(number > _LAST_ID for number in numbers):
            raise BadInput(f"{text!r}: a sample is a number up to {_LAST_ID}")
        return Address(match["run"], iteration, numbers or None)

    parse.__name__ = form  # the type that Typer shows
    return parse


def iteration_of(ledger: "Ledger", address: Address, has: "Callable[[Commit], bool]" = lambda commit: True) -> int:
    """Return the iteration of an address: the newest with a commit that satisfies `has` where it names none. Raises
    BadInput if there is none."""
    if address.iteration is not None:
        return address.iteration
    last = ledger.last_iteration()
    for index in range(-1 if last is None else last, -1, -1):
        if any(map(has, ledger.commits(index))):
            return index
    raise BadInput(f"run {ledger.run!r} has nothing of this kind yet; `cairn status {ledger.run}` says how far it is")


def newest(step: "Step") -> "Callable[[Commit], bool]":
    """Return a condition for `iteration_of`: the iteration has a commit of the step."""
    return lambda commit: commit.step is step


def samples_of(ledger: "Ledger", address: Address) -> "tuple[int, list[SampleView]]":
    """Return the iteration of an address and all its samples. Raises BadInput if there are none."""
    from cairn.flows.reading.samples import iteration_samples
    from cairn.storage.ledger.commits import Step

    iteration = iteration_of(ledger, address, newest(Step.ROLLOUT))
    try:
        return iteration, iteration_samples(ledger, iteration)
    except LookupError as error:
        raise BadInput(str(error)) from None


def the_sample(address: Address, views: "Sequence[SampleView]", iteration: int) -> "SampleView":
    """Return the sample of an address among those of its iteration; the first if the address names none. Raises
    BadInput if there is none."""
    match address.sample:
        case (group, index):
            for view in views:
                if (view.group_id, view.sample_index) == (group, index):
                    return view
            raise BadInput(f"iteration {iteration} of run {address.run!r} has no sample {index} of group {group}")
        case (number,) if number < len(views):
            return views[number]
        case (number,):
            raise BadInput(
                f"iteration {iteration} of run {address.run!r} has samples 0 to {len(views) - 1}, not {number}"
            )
    return views[0]
