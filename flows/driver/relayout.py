"""Going on with a run in another layout: with other numbers of ranks or engines, or another division of the model.

Other sums round otherwise, so bits differ from the first update in the new layout on. The ledger records it as new
terms (`cairn.storage.ledger.terms`); every commit before stays valid under its own. An update of the old layout cannot
be repeated in the new one, so the weights to go on from must be in a checkpoint.
"""

from collections.abc import Sequence
from typing import Any

from cairn.configs.engines import LAYOUT
from cairn.configs.errors import ConfigError
from cairn.configs.loader import inherit
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.trust import require_trusted
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import differences
from cairn.storage.upkeep.retention import newest_checkpoint
from cairn.tasks.trainer.recovery import layout_differences


def in_layout(ledger: Ledger, overrides: Sequence[str]) -> RunConfig:
    """Return a run's recorded configuration with options of the layout set by `a.b=value`, for execution.

    Raises ConfigError for other options, and for values that do not fit together.
    """
    config = require_trusted(inherit(ledger.terms.config, overrides), ledger.store)
    refused = [name for name, *_ in differences_of(ledger.config, config) if name not in LAYOUT]
    if refused:
        raise ConfigError(
            [
                f"--set {name}: only the layout of ranks and engines can change while a run goes on (such as "
                f"training.world_size or rollout.num_engines); `cairn fork {ledger.run}@N NAME --set {name}=…` changes "
                "others"
                for name in refused
            ]
        )
    return config


def differences_of(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return (dotted option, value before, value after) of each option that differs."""
    return differences(before.model_dump(mode="json"), after.model_dump(mode="json"))


def require_no_replay_of_another_layout(ledger: Ledger, config: RunConfig) -> None:
    """Raise ConfigError if the run needs weights that only replays of updates in another layout would give."""
    newest = ledger.last_iteration()
    if newest is None:
        return
    first = max(0, newest - 1 - 2 * ledger.lag)
    trained = next((i for i in range(newest, first - 1, -1) if ledger.find(i, Step.TRAIN) is not None), -1)
    for index in range(max(0, trained - ledger.lag), trained + 1):
        saved = newest_checkpoint(ledger, index)
        begin = -1 if saved is None else saved.iteration
        for replayed in range(begin + 1, index + 1):
            commit = ledger.find(replayed, Step.TRAIN)
            if commit is None or not layout_differences(ledger.config_of(commit), config):
                continue
            newest_one = "it has none" if saved is None else f"its newest is of iteration {begin}"
            raise ConfigError(
                [
                    f"run {ledger.run!r} needs the weights of iteration {index} from a checkpoint to go on in another "
                    f"layout, but {newest_one}, and iteration {replayed} was trained in the other one: resume it in "
                    "the recorded layout up to its next checkpoint (`cairn resume`; SIGTERM makes one at once), or "
                    f"fork it there (`cairn fork {ledger.run}@{max(begin, 0)} NAME --set …`)"
                ]
            )
