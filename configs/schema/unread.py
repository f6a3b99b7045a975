"""Checks for options of `algorithm` that nothing reads in combination with the others: a user set them for a
purpose."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from cairn.configs.kinds import CORRECTION, ESTIMATOR, LOSS, readers

if TYPE_CHECKING:
    from cairn.configs.schema.algorithm import AlgorithmConfig

_NOT_OF_PAIRS = (
    "ref_update_interval",
    "normalize_advantages",
    "use_opd",
    "distillation_loss_coef",
    "use_rollout_logprobs",
    "use_rollout_routing_replay",
    "get_mismatch_metrics",
    "use_tis",
    "custom_pg_loss_reducer_function_path",
    "calculate_per_token_loss",
    "loss_scale_factor",
)
"""Options that would change the weights of pairs, or that read log-probs of a rollout engine."""


def unread(algorithm: "AlgorithmConfig", changed: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield options that no built-in code reads in this combination, the reason, and a change that makes them read.

    Args:
        changed: options that are not at their defaults.
    """
    yield from _by_the_loss(algorithm, changed)
    yield from _by_the_estimator(algorithm)
    yield from _by_the_correction(algorithm, changed)
    if not algorithm.rewards_normalization:
        yield "grpo_std_normalization", "rewards_normalization is false", "set rewards_normalization=true"
    if not algorithm.use_kl_loss:
        for name in ("kl_loss_coef", "use_unbiased_kl"):
            yield name, "use_kl_loss is false", "set use_kl_loss=true"
    # Manifests name k1 even if nothing reads it, and a fork starts with the options of its parent's manifest.
    if not algorithm.reads_kl and algorithm.kl_loss_type != "k1":
        yield "kl_loss_type", "use_kl_loss is false and kl_coef is 0", "set use_kl_loss=true"
    if algorithm.learns_from == "preferences":
        for name in _NOT_OF_PAIRS:
            yield name, "advantage_estimator is dpo", "choose another estimator"
    if not algorithm.reads_kl:
        yield "ref_update_interval", "use_kl_loss is false and kl_coef is 0", "set use_kl_loss=true"
    if not algorithm.use_opd:
        yield "opd_kl_coef", "use_opd is false", "set use_opd=true"
    if not algorithm.learns_from_top_k:
        yield (
            "distillation_topk",
            "distillation_loss_coef is 0",
            "set distillation_loss_coef or loss_type=forward_kl_topk",
        )
    if not algorithm.use_opsm:
        yield "opsm_delta", "use_opsm is false", "set use_opsm=true"


def _by_the_loss(algorithm: "AlgorithmConfig", changed: Collection[str]) -> Iterator[tuple[str, str, str]]:
    usual = algorithm.loss == type(algorithm).model_fields["loss_type"].default
    if usual and not any(name.startswith(("clip_cov_", "kl_cov_", "ppo_kl_")) for name in changed):
        return  # it reads all others, and what ours declare takes long to import
    ours = LOSS.declaration_of_ours(algorithm.loss)
    if ours is None:
        return
    why = f"loss_type is {algorithm.loss}"
    if not algorithm.names_a_loss and not usual:
        why = f"advantage_estimator is {algorithm.advantage_estimator}, trained with the loss {algorithm.loss}"
    if "advantages" not in ours.needs:
        read = {"loss_type", "custom_pg_loss_reducer_function_path", "calculate_per_token_loss"}
        read |= {"distillation_topk"} if algorithm.learns_from_top_k else set()
        for name in type(algorithm).model_fields.keys() - read:
            yield name, why, "choose a loss that follows advantages"
    if algorithm.ratio_to_behaviour:
        for name in ("use_tis", "use_rollout_logprobs"):
            yield name, f"{why}, whose ratio is to the policy that sampled", "choose another loss"
    for name, losses in readers(LOSS).items():
        if algorithm.loss not in losses:
            named = f"set loss_type={' or '.join(losses)}"
            yield name, why, named if algorithm.names_a_loss or usual else "choose another estimator"


def _by_the_correction(algorithm: "AlgorithmConfig", changed: Collection[str]) -> Iterator[tuple[str, str, str]]:
    bounds = {"tis_clip", "tis_clip_low"}
    of_corrections = {name for name in type(algorithm).model_fields if name.startswith(("tis_", "rs_", "use_rs"))}
    if not algorithm.use_tis:
        for name in sorted(of_corrections - (bounds if algorithm.get_mismatch_metrics else set())):
            yield name, "use_tis is false", "set use_tis=true"
        yield "custom_tis_function_path", "use_tis is false", "set use_tis=true"
    correction = algorithm.custom_tis_function_path
    # The declarations of built-in corrections take long to import.
    if of_corrections.isdisjoint(changed) or CORRECTION.declaration_of_ours(correction) is None:
        return
    for name, corrections in readers(CORRECTION).items():
        if correction not in corrections and not (algorithm.get_mismatch_metrics and name in bounds):
            why = f"custom_tis_function_path is {correction}"
            yield name, why, f"set custom_tis_function_path={' or '.join(corrections)}"
    if not algorithm.use_rs:
        for name in ("rs_level", "rs_lower_bound", "rs_upper_bound"):
            yield name, "use_rs is false", "set use_rs=true"
    reads_the_bound = algorithm.tis_mode != "truncate" or (algorithm.use_rs and algorithm.rs_lower_bound is None)
    if correction == "mis" and not reads_the_bound and not algorithm.get_mismatch_metrics:
        yield "tis_clip_low", "tis_mode is truncate", "set tis_mode=clip"


def _by_the_estimator(algorithm: "AlgorithmConfig") -> Iterator[tuple[str, str, str]]:
    if ESTIMATOR.declaration_of_ours(algorithm.advantage_estimator) is None:
        return
    for name, estimators in readers(ESTIMATOR).items():
        if algorithm.advantage_estimator not in estimators:
            why = f"advantage_estimator is {algorithm.advantage_estimator}"
            yield name, why, f"set advantage_estimator={' or '.join(estimators)}"
