"""Checks for options that a run reads only where its policy samples responses, or only where its data hold them."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.configs.schema.run import RunConfig

_OF_GIVEN = ("last_turn_only", "max_length", "overlong")
_OF_DEMONSTRATIONS, _OF_PREFERENCES = ("response_key",), ("chosen_key", "rejected_key")
"""Options of `data` for runs that learn from responses in the rows."""

_OF_SAMPLED: dict[str, tuple[str, ...]] = {
    "data": ("mixture", "get_samples_path", "curriculum", "multimodal_keys", "min_pixels", "max_pixels"),
    "rollout": (
        "n_samples_per_prompt",
        "over_sampling_batch_size",
        "pipeline",
        "lag",
        "partial_rollout",
        "max_age",
        "async_buffer_size",
        "update_weights_interval",
        "staleness_policy",
        "buffer_filter_path",
        "buffer_key",
        "dynamic_sampling_filter",
        "rollout_sample_filter_path",
        "max_refill_rounds",
        "shards_per_round",
        "rollout_max_prompt_len",
        "rollout_max_response_len",
        "rollout_temperature",
        "rollout_top_p",
        "rollout_top_k",
    ),
    "reward": ("overlong_buffer_len", "overlong_penalty_factor"),
}
"""Options of runs whose policy samples the responses that it learns from."""

_OF_ANY_RUN = {"num_rollout", "num_epoch", "rollout_batch_size"}
"""Options of `rollout` for the length of a run and the number of rows that it reads."""

_OF_ENGINES = (
    "num_cpus_per_engine",
    "colocate",
    "offload_train",
    "offload_rollout",
    "update_weight_transport",
    "update_weight_buffer_size",
    "update_weight_disk_dir",
    "update_weight_disk_keep_files",
    "check_weight_update_equal",
)
"""Options of `fleet` for rollout engines, which evaluations need too."""


def require_read(config: "RunConfig") -> None:
    """Raise ValueError where an option is set that nothing reads, given the responses that the run learns from."""
    for section, name, why, way_out in _unread(config):
        options = getattr(config, section)
        value = getattr(options, name)
        if value != type(options).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{section}.{name} ({value}) has no effect while {why}; {way_out}, or leave it out")


def _unread(config: "RunConfig") -> Iterator[tuple[str, str, str, str]]:
    """Yield section and name of each such option, the reason why nothing reads it, and a change that makes it read."""
    algorithm = config.algorithm
    loss, estimator = algorithm.loss_type, algorithm.advantage_estimator
    if config.samples_responses:
        why = f"algorithm.loss_type is {loss}, which learns from responses that are sampled"
        for name in _OF_GIVEN + _OF_DEMONSTRATIONS + _OF_PREFERENCES:
            yield "data", name, why, "set it to sft_loss"
        return
    demonstrations = algorithm.learns_from == "demonstrations"
    why = f"algorithm.advantage_estimator is {estimator}, which learns from pairs that the data holds"
    way_out = "choose another estimator"
    if demonstrations:
        why = f"algorithm.loss_type is {loss}, which learns from responses that the data holds"
        way_out = "choose another loss"
    for name in _OF_PREFERENCES if demonstrations else _OF_DEMONSTRATIONS:
        yield "data", name, why, way_out
    for section, names in _OF_SAMPLED.items():
        for name in names:
            yield section, name, why, way_out
    if config.needs_rollout_engines:
        return
    why += ", and eval.eval_interval is null, so that nothing is sampled or graded"
    of_engines: dict[str, Iterable[str]] = {
        "rollout": sorted(type(config.rollout).model_fields.keys() - _OF_ANY_RUN),
        "reward": type(config.reward).model_fields,
        "fleet": _OF_ENGINES,
    }
    for section, fields in of_engines.items():
        for name in fields:
            yield section, name, why, "set eval.eval_interval"
