"""The Ray cluster that a run uses."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.configs.schema.operations import FleetConfig


ADDRESS = "CAIRN_RAY_ADDRESS"
"""Environment variable with the cluster that runs on this machine join if their configuration names none."""


def ray_address(fleet: "FleetConfig") -> str | None:
    """Return `auto` or `host:port` of the cluster to join; None where the run starts its own."""
    return fleet.ray_address or os.environ.get(ADDRESS) or None
