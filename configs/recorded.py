"""What the manifests of earlier versions say in words that are no options any more."""

from collections.abc import Mapping
from typing import Any


def in_todays_words(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration out of a ledger, as JSON values, with what it says under the names that options have now.

    | then | now |
    |---|---|
    | `training.megatron.deterministic_mode` | `training.deterministic_mode` |
    | no `reward.rm_type_key` | null |
    """
    if "reward" in recorded:  # rows named no graders then
        recorded = {**recorded, "reward": {"rm_type_key": None, **recorded["reward"]}}
    training = recorded.get("training", {})
    if "deterministic_mode" not in training.get("megatron", {}):
        return dict(recorded)
    megatron = dict(training["megatron"])
    moved = {"deterministic_mode": megatron.pop("deterministic_mode"), "megatron": megatron}
    return {**recorded, "training": {**training, **moved}}
