"""How many iterations a run has whose length is given in epochs."""

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.validation import load_tokenizer
from cairn.tasks.data import BadData, open_data
from cairn.tasks.data.given_prompts import GivenPrompts
from cairn.tasks.data.mixture import MixedData


def with_length(config: RunConfig) -> RunConfig:
    """The configuration with `num_rollout` set, where `num_epoch` is: rows // `rollout_batch_size` × `num_epoch`.

    Rows that are passed over, and those of refilled rounds, count as if they were drawn once. Raises ConfigError where
    the two contradict each other, the data have no epochs or fewer rows than a batch, or something else is against the
    configuration.
    """
    epochs, batch, given = config.rollout.num_epoch, config.rollout.rollout_batch_size, config.rollout.num_rollout
    if epochs is None:
        return config
    try:
        data = open_data(config, load_tokenizer(config.model.path))
    except BadData as error:
        raise ConfigError([f"data: {error}"]) from None
    if isinstance(data, MixedData | GivenPrompts):
        what = "each source of a mixture has epochs of its own" if isinstance(data, MixedData) else "it gives no end"
        raise ConfigError(
            [f"rollout.num_epoch is {epochs}, but the data have no epochs: {what}; set rollout.num_rollout instead"]
        )
    total = len(data) // batch * epochs
    made = f"{len(data)} rows // rollout.rollout_batch_size {batch} × rollout.num_epoch {epochs} = {total} iterations"
    if total == 0:
        raise ConfigError([f"{made}: lower rollout.rollout_batch_size, or give more data"])
    if given not in (0, total):
        raise ConfigError(
            [
                f"rollout.num_rollout is {given}, but {made}: leave one of the two out, by "
                "`--set rollout.num_rollout=null` or `--set rollout.num_epoch=null`"
            ]
        )
    values = config.model_dump(mode="json")
    values["rollout"]["num_rollout"] = total
    return parse(values) if given == 0 else config
