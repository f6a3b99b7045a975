"""What computed a step, compared: bitwise equality is claimed between equal environments only."""

from collections.abc import Iterator

from cairn.storage.commits import Commit, Environment
from cairn.tasks.context import RunContext
from cairn.tasks.events import Message


def changes(then: Environment, now: Environment) -> Iterator[str]:
    """A phrase for each difference; the machine's name is none."""
    old, new = (one.model_dump(exclude={"host", "versions"}) | one.versions for one in (then, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name)}, is {new.get(name)}"


def tell_changed_environment(run: RunContext, before: Commit, now: Environment) -> None:
    """Tell, once, that a step is not computed where it was when `before` was committed."""
    changed = "; ".join(changes(before.environment, now))
    if changed and run.notice(f"{before.step} {changed}"):
        run.emit(
            Message(
                f"{before.step} does not run where it ran in iteration {before.iteration} ({changed}): bits may differ "
                "from here on",
                "warning",
            )
        )
