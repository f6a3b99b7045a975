"""What is known of a group when batches are filled."""

from dataclasses import dataclass
from typing import Any

from cairn.storage.ledger.schemas import Disposition


@dataclass(frozen=True)
class JudgedGroup:
    """A group and what was decided about it. `iteration` and `shard` say where its samples lie."""

    group_id: int
    iteration: int
    shard: str
    mean_reward: float | None
    std_reward: float | None
    reason: str | None
    kept: bool
    spare: bool = False
    """Not kept, but better than an unfilled batch."""
    unfinished: bool = False
    """Aborted, to be continued."""
    age: int = 0
    """Of its newest tokens, in publications."""
    max_age: int | None = None
    """Of the tokens of it that may be trained on; None: of any age."""
    priority: float | None = None
    """What the filter gave it; None where it gave nothing."""
    key: Any = None
    """What the metadata of its data row has under `rollout.buffer_key`; None without that option."""
    stale_tokens: int = 0
    """Its tokens that are older than that."""
    stale_weights: tuple[float, ...] = ()
    """Of its tokens of the ages `max_age` + 1, `max_age` + 2, …; those of other ages above it have 0."""
    removed: tuple[int, ...] = ()
    """Of a trained group: the samples, by their places in it, whose tokens are not trained on."""
    disposition: Disposition = Disposition.DROP

    @property
    def is_too_old(self) -> bool:
        """Whether none of its tokens may be trained on."""
        return self.max_age is not None and self.age > self.max_age and not any(self.stale_weights)
