"""What a configuration may make this machine do when it comes out of a store.

Whoever can write to a store can write a manifest there whose digest is right: a digest tells damage, not authors. So a
configuration that was read from a store runs only code that lies where its user works, joins no Ray cluster of another
machine, since the members of a cluster run each other's code, and sends no weights to servers of another machine. A
recipe, given by the user, may name anything. See docs/security.md.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.errors import ConfigError
from configs.schema.run import RunConfig
from engines.rollout.sglang.installation import CODE_OPTIONS, ROUTER_CODE_OPTIONS
from storage import layout
from storage.ledger import Ledger
from storage.store import Store
from tasks.plugins import find_source

_THIS_MACHINE = {"auto", "local", "localhost", "127.0.0.1", "[::1]"}


def recorded_config(ledger: Ledger) -> RunConfig:
    """A run's configuration, to be executed. Raises ConfigError if a store must not ask for it."""
    config = RunConfig.model_validate(ledger.manifest.config)
    require_trusted(config, ledger.store)
    return config


def require_trusted(config: RunConfig, store: Store) -> None:
    """Raise ConfigError unless all that a configuration runs may be named by the store that it comes from."""
    problems = list(_problems(config, store))
    if problems:
        raise ConfigError(problems)


def user_code(config: RunConfig) -> dict[str, str]:
    """Where the user's own functions are, by the option that names each."""
    named = {
        "reward.custom_rm_path": config.reward.custom_rm_path,
        "rollout.dynamic_sampling_filter": config.rollout.dynamic_sampling_filter,
    }
    return {option: path for option, path in named.items() if path is not None and "." in path}


def is_at_hand(source: Path, store: Store) -> bool:
    """Whether a file lies in the working directory or in a folder of PYTHONPATH, and neither in the Python installation
    nor among the runs of a local store."""
    folders = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    others = [Path(sys.prefix), Path(sys.base_prefix), Path(store.url) / layout.runs()]

    def lies_in(folder: Path) -> bool:
        return source.is_relative_to(folder.resolve())

    return any(map(lies_in, folders)) and not any(map(lies_in, others))


def _problems(config: RunConfig, store: Store) -> Iterator[str]:
    again = "or give the recipe again with `cairn train RECIPE --run NAME`"
    for option, path in user_code(config).items():
        source = find_source(path)
        if source is None or not is_at_hand(source, store):
            yield (
                f"{option} is {path!r} in the ledger, and a store may name no code outside the folder one stands in: "
                f"go there, put the code's folder on PYTHONPATH, {again}"
            )
    rollout = config.rollout
    executed = {"rollout.sglang": CODE_OPTIONS & rollout.sglang.keys()}
    executed["rollout.router"] = ROUTER_CODE_OPTIONS & (rollout.router or {}).keys()
    for index, group in enumerate(rollout.server_groups):
        executed[f"rollout.server_groups.{index}.overrides"] = CODE_OPTIONS & group.overrides.keys()
    for section, options in executed.items():
        for option in sorted(options):
            yield (
                f"{section}.{option} is set in the ledger, and a store may not name what a server executes: give the "
                "recipe again with `cairn train RECIPE --run NAME`"
            )
    for url in rollout.external_urls:
        if not _is_here(url.rpartition("://")[2].rstrip("/")):
            yield (
                f"rollout.external_urls names {url!r} in the ledger, and a store may have weights sent to no other "
                "machine: give the recipe again with `cairn train RECIPE --run NAME`"
            )
    address = config.fleet.ray_address
    if address is not None and not _is_here(address):
        yield (
            f"fleet.ray_address is {address!r} in the ledger, and a store may name no cluster of another machine: join "
            f"this machine to it and use `auto`, {again}"
        )


def _is_here(address: str) -> bool:
    """Whether `host` or `host:port` is this machine."""
    return bool({address, address.rpartition(":")[0]} & _THIS_MACHINE)
