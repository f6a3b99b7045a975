"""Facts about a group that are known when batches are filled."""

from dataclasses import dataclass
from typing import Any

from cairn.storage.ledger.schemas import Disposition


@dataclass(frozen=True)
class JudgedGroup:
    """A group and the decision about it. Its samples are in `shard` of `iteration`."""

    group_id: int
    iteration: int
    shard: str
    mean_reward: float | None
    std_reward: float | None
    reason: str | None
    kept: bool
    spare: bool = False
    """Whether the filter rejected the group, but prefers it to an unfilled batch."""
    unfinished: bool = False
    """Whether generation was aborted and will resume."""
    age: int = 0
    """Age of its newest tokens, in publications."""
    max_age: int | None = None
    """Maximum age of its tokens that may be trained on; None: any age."""
    priority: float | None = None
    """Priority from the filter; None without one."""
    key: Any = None
    """Value under `rollout.buffer_key` in the metadata of its data row; None without that option."""
    stale_tokens: int = 0
    """Number of its tokens that are older than `max_age`."""
    stale_weights: tuple[float, ...] = ()
    """Weights of its tokens of the ages `max_age` + 1, `max_age` + 2, …; tokens of higher ages have weight 0."""
    removed: tuple[int, ...] = ()
    """Samples of a trained group that are not trained on, by their positions in it."""
    disposition: Disposition = Disposition.DROP

    @property
    def is_too_old(self) -> bool:
        """Whether none of its tokens may be trained on."""
        return self.max_age is not None and self.age > self.max_age and not any(self.stale_weights)
