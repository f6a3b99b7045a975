"""Which groups come first, of more than a batch has room for. One policy a file, `order(groups) -> groups`."""

from collections.abc import Callable, Iterable, Sequence

from cairn.configs.kinds import BUFFER
from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.buffers.group import JudgedGroup

__all__ = ["BufferPolicy", "JudgedGroup", "get_policy"]

BufferPolicy = Callable[[Sequence[JudgedGroup]], Sequence[JudgedGroup]]
"""`order(groups)`: those that could be trained on in an iteration, and those that wait unfinished, fresh ones after
those of earlier iterations; returns the same groups, those first that are to be used first: of the finished ones the
first make the batch, of the unfinished ones the first go on first. A pure function: its answer is recorded once and
never asked for again."""


def get_policy(name: str) -> BufferPolicy:
    """The policy that `rollout.buffer_filter_path` names. Raises BadPlugin if there is none of that name, or if it
    takes other arguments; the policy does where it returns something else."""
    function = BUFFER.load(name)

    def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
        found = function(list(groups))
        ordered = list(found) if isinstance(found, Iterable) else None
        if ordered is None or sorted(map(id, ordered)) != sorted(map(id, groups)):
            raise BadPlugin(
                f"the buffer policy {name!r} returned something else than the {len(groups)} groups that it was given, "
                "each once, in another order: correct it"
            )
        return ordered

    return order
