"""`fork`: create a run that shares another's iterations up to one of them, and continues with other options."""

from collections.abc import Callable, Sequence

from cairn.configs.errors import BadInput, ConfigError
from cairn.configs.loader import inherit
from cairn.configs.schema.run import RunConfig
from cairn.engines.training.needs import has_critic
from cairn.flows.driver.length import with_length
from cairn.flows.driver.sources import Sources
from cairn.flows.driver.trust import require_trusted
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step, newest_selection
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.store.errors import BeingDeleted, Retired
from cairn.storage.store.store import Store
from cairn.storage.upkeep.collector import delete_run
from cairn.storage.upkeep.retention import require_restorable
from cairn.tasks.durable.selection import number
from cairn.tasks.steps import rules


class CannotFork(BadInput):
    """The requested fork is impossible. The message contains the reason, and an alternative."""


def fork(
    parent: Ledger,
    iteration: int,
    name: str,
    overrides: Sequence[str] = (),
    reason: str | None = None,
    recipe: RunConfig | None = None,
    note: Callable[[str], None] = lambda sentence: None,
) -> Ledger:
    """Create the run `name`, which shares iterations 0 to `iteration` of `parent`, in the parent's store.

    Writes one small file and copies nothing. `overrides` are `a.b=value`, applied to the parent's configuration;
    `reason` is recorded in the fork's manifest; `recipe` is the parent's recipe, where the user passed one; `note` is
    called with a sentence on each option without effect. The parent may be running. Raises CannotFork, ConfigError,
    Retired, BeingDeleted, BadModel, BadData and BadPlugin.
    """
    parent.manifest.require_own("weights and no configuration to fork from")
    config = with_length(require_trusted(inherit(parent.terms.config, overrides, note), parent.store, recipe))
    layout.check_name(name, "run")
    trained = _trained(parent, iteration)
    _check_remaining_iterations(parent, iteration, config)
    before = parent.config_of(trained)
    _check_critic(parent, before, config)
    _check_adapters(parent, before, config)
    _check_state(parent, before, config)
    _check_stream(parent, config)
    lag = config.rollout.weights_lag
    require_restorable(parent, iteration, lag)
    _check_buffer(parent, iteration, before, config)
    # Earlier versions digested model folders in another way: the parent's digests select the way to compare with.
    sources = Sources.open(config, parent.terms.inputs)
    for option, name_of_input in (("path", "model"), ("critic_path", "critic_model")):
        if sources.digests.get(name_of_input) != parent.terms.inputs.get(name_of_input):
            raise CannotFork(
                f"model.{option} ({getattr(config.model, option)}) is not the model that {parent.run} started from, "
                "and the weights of a fork come from its parent; leave it out, or start a new run with `cairn train`"
            )
    origin = Parent(run=parent.run, iteration=iteration, reason=reason)
    if parent.store.exists(layout.run_manifest(name)):
        raise CannotFork(f"there is a run {name!r} already; choose another name")
    created = Ledger.create(parent.store, name, config, sources.digests, origin, rules(config))
    if created.manifest.parent != origin:
        raise CannotFork(f"there is a run {name!r} already; choose another name")
    try:
        # Before they could see the fork, the parent's driver may have removed files, and another process may have
        # deleted it.
        require_restorable(parent, iteration, lag)
        Ledger.open(parent.store, parent.run)
    except (Retired, BeingDeleted, FileNotFoundError):
        delete_run(parent.store, name)
        raise
    return created


def is_fork(store: Store, name: str, parent: str, iteration: int) -> bool:
    """Whether a run is there and is the fork of `parent` at `iteration`."""
    try:
        origin = Ledger.open(store, name).manifest.parent
    except FileNotFoundError:
        return False
    return origin is not None and (origin.run, origin.iteration) == (parent, iteration)


def _trained(parent: Ledger, iteration: int) -> Commit:
    last, commit = parent.last_iteration(), parent.find(iteration, Step.TRAIN)
    if commit is None:
        trained = "it has none yet" if last is None else f"its newest is {last}, trained on or not"
        raise CannotFork(
            f"run {parent.run!r} has not trained iteration {iteration}: {trained}; fork it at an iteration that was "
            "trained, or start a new run with `cairn train`"
        )
    return commit


def _check_remaining_iterations(parent: Ledger, iteration: int, config: RunConfig) -> None:
    total = config.rollout.num_rollout
    if total <= iteration + 1:
        raise CannotFork(
            f"rollout.num_rollout is {total}, but {parent.run}@{iteration} already has that many iterations: set "
            f"rollout.num_rollout to more than {iteration + 1}"
        )


def _check_stream(parent: Ledger, config: RunConfig) -> None:
    streams = [parent.config.rollout.pipeline, config.rollout.pipeline]
    if "streaming" in streams:
        raise CannotFork(
            f"{parent.run} has rollout.pipeline {streams[0]} and the fork {streams[1]}: in the streaming pipeline "
            "some samples of an iteration have prompts of a later one, which a fork does not share; start a new run "
            "from its weights with `cairn export` and `cairn train`"
        )


def _check_buffer(parent: Ledger, iteration: int, before: RunConfig, config: RunConfig) -> None:
    size = before.rollout.n_samples_per_prompt
    selection = newest_selection(parent.commits(iteration))
    assert selection is not None
    waiting = number(selection, "buffered") + number(selection, "unfinished")
    if waiting and config.rollout.n_samples_per_prompt != size:
        raise ConfigError(
            [
                f"rollout.n_samples_per_prompt is {config.rollout.n_samples_per_prompt}, but "
                f"{waiting} groups of {size} wait after {parent.run}@{iteration}: keep {size}, or fork at an iteration "
                "that leaves none"
            ]
        )


def _check_critic(parent: Ledger, before: RunConfig, config: RunConfig) -> None:
    """Raise CannotFork if the fork changes the critic. The critic is part of the training state that a fork continues
    from, and so is the number of the actor's updates: engines derive it from the weight version."""
    old = before.algorithm
    if config.algorithm.advantage_estimator != old.advantage_estimator:
        # has_critic loads the estimators of both configurations
        critic_before = has_critic(require_trusted(before, parent.store, config, of=f" of {parent.run}").algorithm)
        if has_critic(config.algorithm) != critic_before:
            raise CannotFork(
                f"algorithm.advantage_estimator is {config.algorithm.advantage_estimator}, but {parent.run} was "
                f"trained with {old.advantage_estimator}, {'with' if critic_before else 'without'} a critic: keep "
                f"{old.advantage_estimator}, or start a new run with `cairn train`"
            )
    if _critic_only_updates(config) != _critic_only_updates(before):
        raise CannotFork(
            f"algorithm.num_critic_only_steps and training.num_steps_per_rollout must be as in {parent.run}, "
            f"{old.num_critic_only_steps} and {before.training.num_steps_per_rollout}: they determine which past "
            "updates trained only the critic; leave them out, or start a new run with `cairn train`"
        )


def _critic_only_updates(config: RunConfig) -> tuple[int, int]:
    """Return the number of critic-only iterations, and the number of updates in each."""
    iterations = config.algorithm.num_critic_only_steps
    return iterations, config.training.num_steps_per_rollout if iterations else 0


def _check_adapters(parent: Ledger, before: RunConfig, config: RunConfig) -> None:
    """Raise CannotFork if the fork changes the LoRA options. A checkpoint contains only the adapters, and their effect
    depends on how they are inserted into the model."""
    old, lora = before.training.lora, config.training.lora
    if lora != old and (lora.r or old.r):
        raise CannotFork(
            f"training.lora differs from that of {parent.run}, but a fork continues with its adapters (r = "
            f"{old.r}): leave it out, or start a new run with `cairn train`"
        )


def _check_state(parent: Ledger, before: RunConfig, config: RunConfig) -> None:
    """Raise CannotFork if the fork changes the options that define the training state of its checkpoint, or the engine
    that reads it."""
    new, newest = _state_options(config), _state_options(parent.config)
    for option, value in _state_options(before).items():
        if new[option] not in (value, newest[option]):  # the run itself may have gone on in another layout
            raise CannotFork(
                f"{option} differs from that of {parent.run} ({value}), but a fork continues with its training "
                "state: leave it out, or start a new run with `cairn train`"
            )


def _state_options(config: RunConfig) -> dict[str, str]:
    training, interval = config.training, config.algorithm.ref_update_interval
    distributed = training.megatron.get("use_distributed_optimizer", False)
    return {
        "training.engine": training.engine,
        "training.only_train_params_name_list": ", ".join(training.only_train_params_name_list) or "none",
        "training.freeze_params_name_list": ", ".join(training.freeze_params_name_list) or "none",
        "training.moe_router_bias_update_rate": "above 0" if training.moe_router_bias_update_rate else "0",
        "training.megatron.use_distributed_optimizer": str(distributed).lower(),
        "algorithm.ref_update_interval": "null" if interval is None else "a number",
    }
