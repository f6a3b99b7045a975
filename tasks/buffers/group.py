"""What is known of a group when batches are filled."""

from dataclasses import dataclass

from cairn.storage.schemas import Disposition


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
    disposition: Disposition = Disposition.DROP

    @property
    def is_too_old(self) -> bool:
        """Whether none of its tokens may be trained on."""
        return self.max_age is not None and self.age > self.max_age
