"""Who is next, where calls wait: tools take turns, of a tool its episodes, and an episode's oldest call is first."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

One = TypeVar("One")


class Turns(Generic[One]):
    """What waits, each of a tool and an episode."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[One]]] = {}
        """By tools and episodes, both in the order of their turns."""

    def add(self, tool: str, episode: str, one: One) -> None:
        """Behind all others of the episode."""
        self._waiting.setdefault(tool, {}).setdefault(episode, deque()).append(one)

    def take(self, may: Callable[[str, str], bool]) -> One | None:
        """The next one of a tool and an episode that may; None where there is none."""
        for tool, episodes in self._waiting.items():
            for episode, calls in episodes.items():
                if may(tool, episode):
                    del self._waiting[tool], episodes[episode]
                    taken = calls.popleft()
                    if calls:
                        episodes[episode] = calls
                    if episodes:
                        self._waiting[tool] = episodes
                    return taken
        return None
