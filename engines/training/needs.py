"""Requirements of an algorithm, from which the models to load, the steps to run and the columns to read follow.

They are what the functions named in a configuration declare (`cairn.configs.kinds`), and what its options require in
addition.
"""

from cairn.configs.kinds import ESTIMATOR, LOSS
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.engines.types.types import ModelRole

SCORES: dict[str, ModelRole] = {
    "old_log_probs": "actor",
    "ref_log_probs": "ref",
    "teacher_log_probs": "teacher",
    "teacher_top_log_probs": "teacher",
    "values": "critic",
}
"""Columns that a model computes, and the role of that model."""

Needs = dict[str, str]
"""Required columns, each with the option of `algorithm` that requires it, for messages."""


def advantage_needs(algorithm: AlgorithmConfig) -> Needs:
    """Return the scores that the advantage step reads."""
    needs: Needs = {}
    if algorithm.kl_coef > 0:
        needs |= dict.fromkeys(("old_log_probs", "ref_log_probs"), "kl_coef")
    if algorithm.use_opd:
        needs |= dict.fromkeys(("old_log_probs", "teacher_log_probs"), "use_opd")
    name = algorithm.advantage_estimator
    scored = ESTIMATOR.declaration(name).needs & SCORES.keys()
    return needs | dict.fromkeys(scored, f"advantage_estimator={name}")


def needs_components(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantage step reads the graders' components as well as the reward."""
    return "components" in ESTIMATOR.declaration(algorithm.advantage_estimator).needs


def loss_needs(algorithm: AlgorithmConfig) -> Needs:
    """Return the columns of a batch that the losses of the actor and, where there is one, the critic read."""
    name = algorithm.loss
    needs: Needs = dict.fromkeys(LOSS.declaration(name).needs, f"loss_type={name}")
    if has_critic(algorithm):
        reason = needs.get("values", f"advantage_estimator={algorithm.advantage_estimator}")
        needs |= dict.fromkeys(("values", "returns"), reason)
    if not is_policy_gradient(algorithm):
        return needs
    if algorithm.use_kl_loss:
        needs["ref_log_probs"] = "use_kl_loss"
    if algorithm.distillation_loss_coef > 0:
        needs["teacher_top_log_probs"] = "distillation_loss_coef"
    if algorithm.get_mismatch_metrics:
        needs["rollout_log_probs"] = "get_mismatch_metrics"
    for name in ("use_tis", "use_opsm", "use_unbiased_kl"):
        if getattr(algorithm, name):
            needs["rollout_log_probs"] = name
    for name in ("use_tis", "get_mismatch_metrics", "use_rollout_logprobs"):
        if getattr(algorithm, name):
            needs["old_log_probs"] = name
    if algorithm.tis_batch_normalize:
        needs["old_log_probs"] = "tis_batch_normalize"
    return needs


def teacher_top_k(algorithm: AlgorithmConfig) -> int:
    """Return how many of the teacher's most probable tokens the loss reads at each response token; 0: none."""
    return algorithm.distillation_topk if "teacher_top_log_probs" in loss_needs(algorithm) else 0


def old_policy_is_current(algorithm: AlgorithmConfig, num_steps: int) -> bool:
    """Return whether the loss may use the current policy as the old one, without old log-probs.

    The two are the same in the only optimizer step of a batch. Where the loss depends on values of the whole step, the
    old log-probs must be known before it, so they are scored.
    """
    if num_steps > 1 or algorithm.use_rollout_logprobs or algorithm.tis_batch_normalize:
        return False
    return LOSS.declaration(algorithm.loss).picks is None


def is_policy_gradient(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss uses advantages; only then do entropies, divergences and corrections have a meaning."""
    return "advantages" in LOSS.declaration(algorithm.loss).needs


def has_critic(algorithm: AlgorithmConfig) -> bool:
    """Return whether a critic is trained as well as the actor: whether the advantages or the loss use its values."""
    declarations = ESTIMATOR.declaration(algorithm.advantage_estimator), LOSS.declaration(algorithm.loss)
    return any("values" in declaration.needs for declaration in declarations)


def scores_needed(algorithm: AlgorithmConfig, num_steps: int = 1) -> dict[str, ModelRole]:
    """Return the columns to score, each with the role of the model that computes it.

    Args:
        num_steps: optimizer steps of a batch. With one, the old policy is the trained one, which the loss can compute
            itself; advantages cannot.
    """
    of_loss = loss_needs(algorithm).keys() - (
        {"old_log_probs"} if old_policy_is_current(algorithm, num_steps) else set()
    )
    needs = advantage_needs(algorithm).keys() | of_loss
    if algorithm.use_rollout_logprobs:
        needs -= {"old_log_probs"}  # the rollout engine's are used
    return {column: role for column, role in SCORES.items() if column in needs}


def untrained_models(model: ModelConfig, algorithm: AlgorithmConfig) -> dict[ModelRole, str]:
    """Return the folders of the models that an algorithm scores samples with and that no optimizer changes."""
    folders: dict[ModelRole, str | None] = {"ref": model.ref_path or model.path, "teacher": model.teacher_path}
    roles = scores_needed(algorithm).values()
    return {role: folder for role, folder in folders.items() if role in roles and folder is not None}
