"""Guess a number; run by Python in .venv-openenv with a port."""

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    n: int


class Hint(Observation):
    hint: str = ""


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self._number = 0

    def reset(self, seed: int | None = None, **_: object) -> Hint:
        self._number = (seed or 0) % 10
        self._state = State(episode_id="e", step_count=0)
        return Hint(hint="0 to 9?", done=False, reward=0.0)

    def step(self, action: Guess, **_: object) -> Hint:
        self._state.step_count += 1
        match action.n:
            case -1:
                raise ValueError("a number below 0")
            case -2:
                time.sleep(60)
            case -3:
                return Hint(hint="x" * 3_000_000)
            case -4:
                os._exit(3)
        right = action.n == self._number
        hint = "right" if right else "higher" if action.n < self._number else "lower"
        return Hint(hint=hint, done=right, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
