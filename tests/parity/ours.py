"""Our values of the cases that the peers' were recorded of, under the same names."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.configs.kinds import CORRECTION, LOSS, declared
from cairn.configs.schema.algorithm import AlgorithmConfig, KLType
from cairn.engines.training.aggregations import token_weights
from cairn.engines.training.collate import Tokens, require_field
from cairn.engines.training.losses.kl import kl_divergence
from cairn.engines.training.losses.objective import loss_and_metrics, masked, mean_weight
from cairn.engines.training.losses.value import value_loss
from cairn.engines.types.types import TrainBatch
from cairn.tasks.advantages.batch import ScoredBatch, normalise
from cairn.tasks.advantages.step import distil, estimate, reverse_kl
from tests.parity.recording import OWN, SEVERAL

HERE = Path(__file__).parent
DATA: dict[str, Any] = json.loads((HERE / "batch.json").read_text())
MASKS = [np.array(mask, np.uint8) for mask in DATA["loss_masks"]]
COUNTS = [int(mask.sum()) for mask in MASKS]
CLIPS = {name: OWN[name] for name in ("eps_clip", "eps_clip_high")}
DPPO = {"eps_clip": OWN["dppo_clip"], "eps_clip_high": OWN["dppo_clip_high"]}

AGGREGATIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "calculate_per_token_loss": {"calculate_per_token_loss": True},
    "loss_scale_factor": {"loss_scale_factor": OWN["loss_scale_factor"]},
}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "policy_loss": ("advantages", {**CLIPS}),
    "dual_clip": ("advantages", {**CLIPS, "eps_clip_c": OWN["eps_clip_c"]}),
    "cispo": ("advantages", {"loss_type": "cispo", **CLIPS}),
    "gspo": ("sample_advantages", {"loss_type": "gspo", **CLIPS}),
    "dppo_tv": ("advantages", {"loss_type": "dppo_tv", **DPPO}),
    "dppo_kl": ("advantages", {"loss_type": "dppo_kl", **DPPO}),
    "clip_cov": (
        "advantages",
        {"loss_type": "clip_cov", **CLIPS, **{n: OWN[n] for n in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")}},
    ),
    "kl_cov": ("advantages", {"loss_type": "kl_cov", **{n: OWN[n] for n in ("kl_cov_ratio", "ppo_kl_coef")}}),
    "opsm": ("sample_advantages", {"use_opsm": True, "opsm_delta": OWN["opsm_delta"], **CLIPS}),
}
"""Of each loss, the advantages that it is given and its options."""
NOT_OF_SLIME = {"dppo_tv", "dppo_kl", "clip_cov", "kl_cov"}

Values = np.ndarray
"""A case's values: of a loss one number, else of all response tokens, 0 at those of the environment."""


DIFFERENCES = {
    ("slime", "advantage/reinforce_plus_plus_kl_returns"): (
        "advantage/reinforce_plus_plus_unmasked_kl_returns",
        "discounts once more for every token of the environment between two that are trained on",
    ),
}
"""Where a peer computes something else, on purpose or by mistake: the case in which the difference plays no part, and
what the difference is."""


@dataclass(frozen=True)
class Case:
    """What a peer calls a case, and how it is computed here."""

    compute: Callable[[torch.dtype], Values]
    closed: bool = True
    """Whether it is computed in the precision that is asked for; otherwise in float32, or kept so."""


def cases(peer: str) -> Mapping[str, Case]:
    """All that are compared with a peer's."""
    if peer == "trl":
        return _preferences()
    return {**_advantages(peer), **_losses(peer), **_corrections(peer), **_divergences(peer)}


def flat(fields: Sequence[Sequence[float] | np.ndarray]) -> Values:
    """[T_i] of each sample → one after the other, in float64."""
    return np.concatenate([np.asarray(field, np.float64) for field in fields])


def _spread(values: torch.Tensor) -> Values:
    """[M] of trained tokens → of all, zeros at the others."""
    whole = np.zeros(sum(map(len, MASKS)))
    whole[np.concatenate(MASKS).astype(bool)] = values.detach().double().numpy()
    return whole


def _fields(name: str) -> list[np.ndarray]:
    return [np.array(field, np.float32) for field in DATA[name]]


def _trained(name: str, dtype: torch.dtype) -> torch.Tensor:
    """[M] of the trained tokens."""
    if name == "sample_advantages":
        return torch.tensor(np.repeat(DATA[name], COUNTS), dtype=dtype)
    return torch.tensor(flat(DATA[name])[np.concatenate(MASKS).astype(bool)], dtype=dtype)


def _advantages(peer: str) -> dict[str, Case]:
    old, ref = ([torch.tensor(field) for field in _fields(name)] for name in ("old_log_probs", "ref_log_probs"))
    kl = [kl_divergence(p.double(), r.double(), "k1").numpy() for p, r in zip(old, ref, strict=True)]

    def case(part: int = 0, whiten: bool = False, masks: Sequence[np.ndarray] = MASKS, **options: Any) -> Case:
        def compute(dtype: torch.dtype) -> Values:
            config = AlgorithmConfig(**options)
            rewards = np.array(DATA["rewards"], np.float32)
            lowered = kl if config.kl_coef > 0 else None
            columns = zip(*(DATA[name] for name in SEVERAL), strict=True)
            several = [dict(zip(SEVERAL, values, strict=True)) for values in columns]
            batch = ScoredBatch(
                rewards, DATA["group_sizes"], masks, values=_fields("values"), kl=lowered, components=several
            )
            found = estimate(batch, config)[part]
            found = normalise(found, masks) if whiten else found
            return flat([field * mask for field, mask in zip(found, masks, strict=True)])

        return Case(compute, closed=False)

    def distilled(dtype: torch.dtype) -> Values:
        divergences = reverse_kl(_fields("old_log_probs"), _fields("teacher_log_probs"))
        found = distil(_fields("advantages"), divergences, MASKS, OWN["opd_kl_coef"])
        return flat([field * mask for field, mask in zip(found, MASKS, strict=True)])

    penalty: dict[str, Any] = {"kl_coef": OWN["kl_coef"]}
    whitened: dict[str, Any] = {"normalize_advantages": True}  # by the step, after the estimator
    plus: dict[str, Any] = {"advantage_estimator": "reinforce_plus_plus", "gamma": OWN["gamma"], **whitened}
    baseline: dict[str, Any] = {"advantage_estimator": "reinforce_plus_plus_baseline", **whitened}
    gae: dict[str, Any] = {"advantage_estimator": "ppo", "gamma": OWN["gamma"], "lambd": OWN["lambd"]}
    several: dict[str, Any] = {"gdpo_reward_keys": [*SEVERAL], "gdpo_reward_weights": [*SEVERAL.values()], **whitened}
    every = [np.ones_like(mask) for mask in MASKS]
    found = {
        "verl": {
            "grpo": case(),
            "dr_grpo": case(grpo_std_normalization=False),
            "rloo": case(advantage_estimator="rloo"),
            "rloo_kl": case(advantage_estimator="rloo", **penalty),
            "gdpo": case(whiten=True, advantage_estimator="gdpo", **several),  # verl whitens over tokens
            "reinforce_plus_plus": case(whiten=True, **plus),
            "reinforce_plus_plus_returns": case(part=1, **plus),
            "reinforce_plus_plus_kl": case(whiten=True, **plus, **penalty),
            "reinforce_plus_plus_kl_returns": case(part=1, **plus, **penalty),
            "reinforce_plus_plus_baseline": case(whiten=True, **baseline),
            "ppo": case(whiten=True, **gae),
            "ppo_returns": case(part=1, **gae),
            "ppo_kl": case(whiten=True, **gae, **penalty),
            "ppo_kl_returns": case(part=1, **gae, **penalty),
        },
        "slime": {
            "reinforce_plus_plus_unmasked_kl_returns": case(part=1, masks=every, **plus, **penalty),
            "reinforce_plus_plus_baseline_kl_raw": case(**baseline, **penalty),
            "ppo_unmasked_kl": case(masks=every, **gae, **penalty),
            "ppo_unmasked_kl_returns": case(part=1, masks=every, **gae, **penalty),
            "opd": Case(distilled, closed=False),
        },
    }
    return {f"advantage/{name}": case for name, case in found[peer].items()}


def _tokens(dtype: torch.dtype, advantages: str = "advantages", config: AlgorithmConfig | None = None) -> Tokens:
    """All trained tokens, as one micro-batch; each weighs 1 without a configuration."""
    nothing = torch.zeros(0, dtype=torch.int64)
    weights = np.ones(len(COUNTS)) if config is None else [w.loss for w in token_weights(COUNTS, config)]
    shares = torch.tensor(np.repeat(weights, COUNTS), dtype=dtype)
    logs = {name: _trained(name, dtype) for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")}
    return Tokens(
        input_ids=nothing[:, None],
        positions=nothing,
        targets=torch.zeros(sum(COUNTS), dtype=torch.int64),
        weights=shares,
        shares=shares,
        samples=torch.tensor(np.repeat(np.arange(len(COUNTS)), COUNTS)),
        groups=torch.tensor(np.repeat(np.arange(len(DATA["group_sizes"])), DATA["group_sizes"])),
        counts=torch.tensor(COUNTS, dtype=dtype),
        advantages=_trained(advantages, dtype),
        **logs,
    )


def _losses(peer: str) -> dict[str, Case]:
    def of_batch(name: str, aggregation: str, gradient: bool) -> Case:
        advantages, options = LOSSES[name]
        config = AlgorithmConfig(**options, **AGGREGATIONS[aggregation])

        def compute(dtype: torch.dtype) -> Values:
            log_probs = _trained("log_probs", dtype).requires_grad_()
            tokens = _as_verl(_tokens(dtype, advantages, config), log_probs.detach(), config)
            loss, _ = loss_and_metrics(log_probs, torch.zeros_like(log_probs), tokens, config)
            return _spread(torch.autograd.grad(loss, log_probs)[0]) if gradient else loss.detach().double().numpy()

        return Case(compute, closed=aggregation != "mean")  # verl adds 1e-8 to a sample's number of tokens

    def of_tokens(name: str, gradient: bool) -> Case:
        advantages, options = LOSSES[name]
        config = AlgorithmConfig(**options)

        def compute(dtype: torch.dtype) -> Values:
            log_probs = _trained("log_probs", dtype).requires_grad_()
            tokens = _tokens(dtype, advantages)
            if config.use_opsm:  # slime holds the trainer's log-probs against the policy, ours are the rollout engine's
                tokens = replace(tokens, rollout_log_probs=tokens.old_log_probs)
            losses, _ = LOSS.load(config.loss)(log_probs, tokens, config)
            if config.use_opsm:
                losses = losses * (1 - masked(log_probs.detach(), tokens, config))
            return _spread(torch.autograd.grad(losses.sum(), log_probs)[0] if gradient else losses)

        return Case(compute)

    def of_values(gradient: bool) -> Case:
        def compute(dtype: torch.dtype) -> Values:
            values = _trained("new_values", dtype).requires_grad_()
            losses, _ = value_loss(values, _trained("values", dtype), _trained("returns", dtype), OWN["value_clip"])
            loss = _tokens(dtype, config=AlgorithmConfig()).mean(losses) / 2  # theirs are halved
            return _spread(torch.autograd.grad(loss, values)[0]) if gradient else loss.detach().double().numpy()

        return Case(compute, closed=False)

    found: dict[str, Case] = {}
    for part in ("loss", "gradient"):
        for name in LOSSES:
            if peer == "slime" and name not in NOT_OF_SLIME:
                found[f"token_{part}/{name}"] = of_tokens(name, part == "gradient")
            if peer == "slime" or name == "opsm":
                continue
            for aggregation in AGGREGATIONS:
                found[f"{part}/{name}/{aggregation}"] = of_batch(name, aggregation, part == "gradient")
        if peer == "verl":
            found[f"{part}/value/half"] = of_values(part == "gradient")
    return found


def _as_verl(tokens: Tokens, current: torch.Tensor, config: AlgorithmConfig) -> Tokens:
    """Its ratios are to the old policy for every loss, and its covariances are of the current one."""
    if config.ratio_to_behaviour:
        tokens = replace(tokens, rollout_log_probs=tokens.old_log_probs)
    picks = declared(LOSS.load(config.loss)).picks
    if picks is None:
        return tokens
    picked = picks(require_field(tokens.advantages).numpy(), current.numpy(), config)
    return replace(tokens, picked=torch.tensor(picked, dtype=current.dtype))


def _preferences() -> dict[str, Case]:
    """Two samples that follow each other are a pair, of which the first is preferred."""

    def case(gradient: bool, smoothing: float) -> Case:
        config = AlgorithmConfig(advantage_estimator="dpo", dpo_beta=OWN["dpo_beta"], dpo_label_smoothing=smoothing)

        def compute(dtype: torch.dtype) -> Values:
            pairs = [2] * (len(MASKS) // 2)
            old, ref = _fields("old_log_probs"), _fields("ref_log_probs")
            made = estimate(ScoredBatch(np.tile([1, 0], len(pairs)), pairs, MASKS, None, old, ref), config)
            kept = np.concatenate(MASKS).astype(bool)
            advantages, returns = (torch.tensor(flat(part)[kept], dtype=dtype) for part in made)
            tokens = replace(_tokens(dtype, config=config), advantages=advantages, returns=returns)
            log_probs = _trained("old_log_probs", dtype).requires_grad_()
            loss, _ = loss_and_metrics(log_probs, torch.zeros_like(log_probs), tokens, config)
            return _spread(torch.autograd.grad(loss, log_probs)[0]) if gradient else loss.detach().double().numpy()

        return Case(compute, closed=False)

    return {
        f"{part}/{name}": case(part == "gradient", smoothing)
        for name, smoothing in {"dpo": 0.0, "dpo_smoothed": OWN["dpo_label_smoothing"]}.items()
        for part in ("loss", "gradient")
    }


def _corrections(peer: str) -> dict[str, Case]:
    def normalized(name: str, **options: Any) -> Case:
        config = AlgorithmConfig(
            use_tis=True, custom_tis_function_path=name, tis_clip=OWN["tis_clip"], tis_batch_normalize=True, **options
        )
        prompt = np.zeros(1, np.int32)
        batch = TrainBatch(
            input_ids=[np.concatenate([prompt, mask.astype(np.int32)]) for mask in MASKS],
            response_lengths=[len(mask) for mask in MASKS],
            loss_mask=MASKS,
            old_log_probs=_fields("old_log_probs"),
            rollout_log_probs=_fields("rollout_log_probs"),
        )

        def compute(dtype: torch.dtype) -> Values:
            weights, _ = CORRECTION.load(name)(_tokens(dtype), config)
            return _spread(weights / mean_weight(batch, range(len(MASKS)), config))

        return Case(compute, closed=False)

    def case(name: str, *, kept: bool = False, **options: Any) -> Case:
        config = AlgorithmConfig(use_tis=True, custom_tis_function_path=name, tis_clip=OWN["tis_clip"], **options)

        def compute(dtype: torch.dtype) -> Values:
            weights, _ = CORRECTION.load(name)(_tokens(dtype), config)
            return _spread((weights != 0).to(dtype) if kept else weights)

        return Case(compute)

    low: dict[str, Any] = {"tis_clip_low": OWN["tis_clip_low"]}
    levels = ("token", "sequence", "geometric")
    found = {"icepop": case("icepop", **low)}
    if peer == "verl":
        found |= {"tis": case("tis"), "tis_sequence": case("mis", tis_level="sequence")}
        found |= {"tis_normalized": normalized("tis")}
        found |= {"tis_sequence_normalized": normalized("mis", tis_level="sequence")}
        found |= {f"mask_{level}": case("mis", kept=True, tis_level=level, tis_mode="mask", **low) for level in levels}
    if peer == "slime":
        found["tis"] = case("tis", **low)
        for level in ("token", "sequence"):
            for mode, bounds in {"truncate": {}, "clip": low}.items():
                found[f"mis_{level}_{mode}_normalized"] = normalized("mis", tis_level=level, tis_mode=mode, **bounds)
        for level in levels:
            for mode, bounds in {"truncate": {}, "clip": low, "mask": low}.items():
                found[f"mis_{level}_{mode}"] = case("mis", tis_level=level, tis_mode=mode, **bounds)
            rejecting = {"rs_lower_bound": OWN["tis_clip_low"], "rs_upper_bound": OWN["tis_clip"]}
            found[f"mis_reject_{level}"] = case("mis", use_rs=True, rs_level=level, **rejecting)
        found["mis_veto"] = case("mis", rs_veto_threshold=OWN["rs_veto_threshold"])
    return {f"correction/{name}": case for name, case in found.items()}


def _divergences(peer: str) -> dict[str, Case]:
    def case(kind: KLType, *, unbiased: bool = False) -> Case:
        def compute(dtype: torch.dtype) -> Values:
            old = _trained("old_log_probs", dtype) if unbiased else None
            return _spread(kl_divergence(_trained("log_probs", dtype), _trained("ref_log_probs", dtype), kind, old))

        return Case(compute, closed=peer != "slime")  # which computes them in float32

    kinds: dict[str, tuple[KLType, ...]] = {
        "verl": ("k1", "k2", "low_var_kl"),
        "slime": ("k1", "k2", "k3", "low_var_kl"),
    }
    found = {f"kl/{kind}": case(kind) for kind in kinds[peer]}
    if peer == "slime":
        found |= {f"kl/{kind}_unbiased": case(kind, unbiased=True) for kind in kinds[peer]}
    return found
