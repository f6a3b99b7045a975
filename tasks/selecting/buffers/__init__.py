"""Order of groups where a batch has no room for all of them. One policy a file, `order(groups) -> groups`."""

from collections.abc import Callable, Iterable, Sequence

from cairn.configs.kinds import BUFFER
from cairn.configs.plugins import BadPlugin
from cairn.tasks.selecting.buffers.group import JudgedGroup

__all__ = ["BufferPolicy", "JudgedGroup", "get_policy"]

BufferPolicy = Callable[[Sequence[JudgedGroup]], Sequence[JudgedGroup]]
"""`order(groups)`: a pure function, whose result is recorded once. It gets the groups that an iteration may train on,
and unfinished ones that wait; new groups come after those of earlier iterations. It returns the same groups in another
order: the first finished ones make the batch, and the first unfinished ones resume first."""


def get_policy(name: str) -> BufferPolicy:
    """Return the policy that `rollout.buffer_filter_path` names.

    Raises BadPlugin if no policy has that name, or if it takes other arguments. The policy raises it where it returns
    something else.
    """
    function = BUFFER.load(name)

    def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
        returned = function(list(groups))
        ordered = list(returned) if isinstance(returned, Iterable) else None
        if ordered is None or sorted(map(id, ordered)) != sorted(map(id, groups)):
            raise BadPlugin(
                f"the buffer policy {name!r} must return the {len(groups)} groups that it received, each once, "
                "in any order: correct it"
            )
        return ordered

    return order
