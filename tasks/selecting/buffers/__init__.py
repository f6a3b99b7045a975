"""Order of groups where a batch has no room for all of them. One policy a file, `order(groups) -> groups`."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cairn.configs.kinds import BUFFER, written_for_slime
from cairn.configs.plugins import BadPlugin
from cairn.tasks import slime
from cairn.tasks.selecting.buffers.group import JudgedGroup

__all__ = ["BufferPolicy", "JudgedGroup", "get_policy"]

BufferPolicy = Callable[[Sequence[JudgedGroup]], Sequence[JudgedGroup]]
"""`order(groups)`: a pure function, whose result is recorded once. It gets the groups that an iteration may train on,
and unfinished ones that wait; new groups come after those of earlier iterations. It returns the same groups in another
order: the first finished ones make the batch, and the first unfinished ones resume first."""


class SlimeGroup(list[slime.Sample]):
    """A group of samples in slime's buffer. It has the attributes of its first sample, and the mean reward."""

    def __init__(self, group: JudgedGroup, samples: Sequence[slime.Sample]) -> None:
        status = slime.Status.ABORTED if group.unfinished else slime.Status.COMPLETED
        super().__init__(samples or [slime.GroupSample(status=status, group_index=group.group_id)])
        self.group = group
        self.reward = group.mean_reward

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


def in_order_of_slime(
    choose: Callable[..., Any],
    args: Mapping[str, Any],
    count: int,
    samples_of: Callable[[JudgedGroup], Sequence[slime.Sample]],
) -> BufferPolicy:
    """Return the policy of a function written for slime, `buffer_filter(args, rollout_id, buffer, num_samples)`: the
    groups that it returns come first, the others after them.

    Args:
        count: groups in a batch.
        samples_of: returns the graded samples of a group; none for an unfinished one.
    """
    more = (None,) if "rollout_id" in inspect.signature(choose).parameters else ()

    def order(groups: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
        buffer = [SlimeGroup(group, samples_of(group)) for group in groups]
        chosen = choose(slime.Arguments(args), *more, list(buffer), count)
        first = [one.group for one in chosen if isinstance(one, SlimeGroup)]
        return [*first, *(group for group in groups if group not in first)]

    return order


def get_policy(
    name: str, of_slime: Callable[[Callable[..., Any]], BufferPolicy] = lambda function: function
) -> BufferPolicy:
    """Return the policy that `rollout.buffer_filter_path` names. `of_slime` adapts a function written for slime.

    Raises BadPlugin if no policy has that name, or if it takes other arguments. The policy raises it where it returns
    something else.
    """
    function = BUFFER.load(name)
    if written_for_slime(function):
        function = of_slime(function)

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
