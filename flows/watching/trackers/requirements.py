"""What trackers need that is not there, told before a run starts."""

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from cairn.configs.schema.operations import TrackingConfig

_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def tracking_problems(config: TrackingConfig) -> Iterator[str]:
    """Sentences on trackers that are asked for and cannot work."""
    for option, module in (("use_wandb", "wandb"), ("use_mlflow", "mlflow")):
        if getattr(config, option) and find_spec(module) is None:
            yield (
                f"tracking.{option} needs the extra {module}, which is not installed: "
                f"pip install 'cairn-rl[{module}]', or leave the option out"
            )
    if config.use_wandb and config.wandb_mode == "online" and not _has_wandb_key(config.wandb_host):
        yield (
            "tracking.use_wandb needs a key and finds none: set WANDB_API_KEY, log in with `wandb login`, or set "
            "tracking.wandb_mode to offline"
        )


def _has_wandb_key(host: str | None) -> bool:
    """As W&B looks for one; it would ask at the terminal if there were none."""
    if any(map(os.environ.get, _CREDENTIALS)):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(urlsplit(host or "https://api.wandb.ai").hostname or "") is not None
