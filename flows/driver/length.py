"""Number of iterations of a run whose length is configured in epochs."""

from cairn.configs.errors import BadData, ConfigError
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.stream import StatefulPrompts


def with_length(config: RunConfig) -> RunConfig:
    """Return the configuration with `num_rollout` set, where `num_epoch` is: rows // `rollout_batch_size` ×
    `num_epoch`.

    Rows that are passed over, and rows of refill rounds, count as drawn once. Raises ConfigError where the two options
    contradict each other, the data have no epochs or fewer rows than a batch, or the configuration is invalid for
    another reason.
    """
    epochs, batch, configured = config.rollout.num_epoch, config.rollout.rollout_batch_size, config.rollout.num_rollout
    if epochs is None:
        return config
    try:
        data = open_data(config, load_tokenizer(config.model.path))
    except BadData as error:
        raise ConfigError([f"data: {error}"]) from None
    if isinstance(data, MixedData | StatefulPrompts):
        what = "each source of a mixture has epochs of its own" if isinstance(data, MixedData) else "they have no end"
        raise ConfigError(
            [f"rollout.num_epoch is {epochs}, but the data have no epochs: {what}; set rollout.num_rollout instead"]
        )
    rows = len(data)
    total = rows // batch * epochs
    equation = f"{rows} rows // rollout.rollout_batch_size {batch} × rollout.num_epoch {epochs} = {total} iterations"
    if total == 0:
        raise ConfigError([f"{equation}: lower rollout.rollout_batch_size, or use more data"])
    if configured not in (0, total):
        raise ConfigError(
            [
                f"rollout.num_rollout is {configured}, but {equation}: leave one of the two out, by "
                "`--set rollout.num_rollout=null` or `--set rollout.num_epoch=null`"
            ]
        )
    values = config.model_dump(mode="json")
    values["rollout"]["num_rollout"] = total
    return parse(values) if configured == 0 else config
