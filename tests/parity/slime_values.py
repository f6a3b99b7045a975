"""Values of slime's own functions: `.venv-verl/bin/python slime_values.py CHECKOUT COMMIT BATCH.json OUT.json`.

slime is no package that installs without a GPU, so its source is read from a checkout: whole files beside a Megatron
that says that there is one rank, and of those that import more, the functions that are asked for.
"""

import ast
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from recording import OWN, Batch, Fields, record

LOGS = {"train": "old", "rollout": "rollout"}
SOURCES: dict[str, Any] = {}


def load(checkout: Path) -> None:
    """Find all functions."""
    megatron, core = ModuleType("megatron"), ModuleType("megatron.core")
    core.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)  # type: ignore[attr-defined]
    sys.modules |= {"megatron": megatron, "megatron.core": core}
    SOURCES["ppo"] = module(checkout / "slime/utils/ppo_utils.py")
    SOURCES["mis"] = module(checkout / "examples/train_infer_mismatch_helper/mis.py")
    SOURCES["icepop"] = function(checkout / "slime/backends/megatron_utils/loss.py", "icepop_function")
    SOURCES["tis"] = function(checkout / "slime/backends/megatron_utils/loss.py", "vanilla_tis_function")
    SOURCES["opd"] = function(checkout / "slime/backends/megatron_utils/loss.py", "apply_opd_kl_to_advantages")


def module(path: Path) -> ModuleType:
    """A file as a module of its own."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def function(path: Path, name: str) -> Callable[..., Any]:
    """One function of a file, of which nothing else runs."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"torch": torch, "Any": Any, "Namespace": Namespace, "RolloutBatch": dict}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    loaded: Callable[..., Any] = scope[name]
    return loaded


def compute(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """All cases."""
    return {**advantages(batch), **losses(batch), **corrections(batch), **divergences(batch)}


def masked(fields: Fields, masks: Fields) -> Fields:
    """Zeros at tokens of the environment."""
    return [field * mask for field, mask in zip(fields, masks, strict=True)]


def advantages(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Of every response token; `_unmasked` of a batch without tokens of the environment."""
    ppo, masks = SOURCES["ppo"], batch.of_tokens("loss_masks")
    lengths = [len(mask) for mask in masks]
    pairs = zip(batch.of_tokens("old_log_probs"), batch.of_tokens("ref_log_probs"), strict=True)
    kl = [ppo.compute_approx_kl(policy, ref, "k1").to(batch.dtype) for policy, ref in pairs]
    rewards = batch.of_samples("rewards")
    every = [torch.ones_like(mask) for mask in masks]
    options = lengths, lengths, OWN["kl_coef"], OWN["gamma"]
    returns, unmasked = (ppo.get_reinforce_plus_plus_returns(rewards, kl, of, *options) for of in (masks, every))
    token_rewards = [-OWN["kl_coef"] * field for field in kl]
    for field, reward in zip(token_rewards, rewards, strict=True):
        field[-1] += reward
    values = batch.of_tokens("values")
    gae = ppo.get_advantages_and_returns_batch(lengths, lengths, values, token_rewards, OWN["gamma"], OWN["lambd"])
    centred = torch.cat([group - group.mean() for group in rewards.split(batch.group_sizes)])
    baseline = ppo.get_reinforce_plus_plus_baseline_advantages(centred, kl, masks, OWN["kl_coef"])
    distilled = batch.of_tokens("advantages")
    args = Namespace(opd_kl_coef=OWN["opd_kl_coef"], opd_type="megatron")
    SOURCES["opd"](
        args, {"teacher_log_probs": batch.of_tokens("teacher_log_probs")}, distilled, batch.of_tokens("old_log_probs")
    )
    return {
        "advantage/reinforce_plus_plus_kl_returns": masked(returns, masks),
        "advantage/reinforce_plus_plus_unmasked_kl_returns": unmasked,
        "advantage/reinforce_plus_plus_baseline_kl_raw": masked(baseline, masks),
        "advantage/ppo_unmasked_kl": gae[0],
        "advantage/ppo_unmasked_kl_returns": gae[1],
        "advantage/opd": masked(distilled, masks),
    }


def losses(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Of every token, and the gradients of log-probs by their sum over trained tokens."""
    ppo, masks = SOURCES["ppo"], batch.of_tokens("loss_masks")
    lengths, mask = [len(field) for field in masks], torch.cat(masks)
    old, advantages = batch.of_tokens("old_log_probs"), torch.cat(batch.of_tokens("advantages"))
    spread = [torch.full_like(m, float(a)) for m, a in zip(masks, batch.of_samples("sample_advantages"), strict=True)]
    low, high = OWN["eps_clip"], OWN["eps_clip_high"]
    found: dict[str, torch.Tensor | Fields] = {}

    def case(name: str, loss: Callable[[Fields], torch.Tensor]) -> None:
        log_probs = [field.requires_grad_() for field in batch.of_tokens("log_probs")]
        losses = loss(log_probs) * mask
        found[f"token_loss/{name}"] = list(losses.detach().split(lengths))
        found[f"token_gradient/{name}"] = list(torch.autograd.grad(losses.sum(), log_probs))

    def moved(log_probs: Fields) -> torch.Tensor:
        return torch.cat(old) - torch.cat(log_probs)

    def gspo(log_probs: Fields) -> torch.Tensor:
        of_responses = ppo.compute_gspo_kl(log_probs, old, log_probs, masks)
        return ppo.compute_policy_loss(of_responses, torch.cat(spread), low, high)[0]

    def opsm(log_probs: Fields) -> torch.Tensor:
        unmasked, _ = ppo.compute_opsm_mask(Namespace(**OWN), [p.detach() for p in log_probs], old, spread, masks)
        return ppo.compute_policy_loss(moved(log_probs), torch.cat(spread), low, high)[0] * unmasked

    case("policy_loss", lambda p: ppo.compute_policy_loss(moved(p), advantages, low, high)[0])
    case("dual_clip", lambda p: ppo.compute_policy_loss(moved(p), advantages, low, high, OWN["eps_clip_c"])[0])
    case("cispo", lambda p: ppo.compute_cispo_loss(moved(p), torch.cat(p), advantages, low, high)[0])
    case(
        "gspo",
        lambda p: ppo.compute_policy_loss(ppo.compute_gspo_kl(p, old, p, masks), torch.cat(spread), low, high)[0],
    )
    case("opsm", opsm)
    return found


def corrections(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Weights of tokens against the rollout engine's distribution, those that are masked at 0."""
    masks = batch.of_tokens("loss_masks")
    lengths = [len(mask) for mask in masks]
    logs = {
        "train_log_probs": batch.of_tokens("old_log_probs"),
        "rollout_log_probs": batch.of_tokens("rollout_log_probs"),
    }
    found: dict[str, torch.Tensor | Fields] = {}
    for name in ("tis", "icepop"):
        ones = torch.cat(masks)  # the loss of a token is its mask, so what comes back is its weight
        weights, _, _ = SOURCES[name](Namespace(**OWN), pg_loss=ones, loss_masks=masks, **logs)
        found[f"correction/{name}"] = list(weights.split(lengths))
    for level in ("token", "sequence"):
        for mode in ("truncate", "clip"):
            options = {"tis_level": level, "tis_mode": mode, "tis_batch_normalize": True}
            found[f"correction/mis_{level}_{mode}_normalized"] = mis(batch, masks, logs, **options)
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "clip", "mask"):
            found[f"correction/mis_{level}_{mode}"] = mis(batch, masks, logs, tis_level=level, tis_mode=mode)
        rejected = mis(batch, masks, logs, tis_level="token", tis_mode="truncate", use_rs=True, rs_level=level)
        found[f"correction/mis_reject_{level}"] = rejected
    vetoed = mis(
        batch,
        masks,
        logs,
        use_rs=True,
        rs_lower_bound=1e-9,
        rs_upper_bound=1e9,
        rs_veto_threshold=OWN["rs_veto_threshold"],
    )
    return found | {"correction/mis_veto": vetoed}


def mis(batch: Batch, masks: Fields, logs: dict[str, Fields], **options: Any) -> Fields:
    """Masked importance sampling."""
    config = {"use_tis": True, "use_rs": False, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate"}
    config |= {"tis_lower_bound": OWN["tis_clip_low"], "tis_upper_bound": OWN["tis_clip"], "tis_batch_normalize": False}
    config |= {"rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": None, **options}
    weights, accepted, _ = SOURCES["mis"].compute_mis_weights(Namespace(**config), loss_masks=masks, **logs)
    return [w.to(batch.dtype) * k.to(batch.dtype) for w, k in zip(weights, accepted, strict=True)]


def divergences(batch: Batch) -> dict[str, torch.Tensor | Fields]:
    """Estimates of the divergence from the reference model; slime computes them in float32."""
    masks, kl = batch.of_tokens("loss_masks"), SOURCES["ppo"].compute_approx_kl
    log_probs, ref, old = (batch.of_tokens(f"{name}log_probs") for name in ("", "ref_", "old_"))
    found: dict[str, torch.Tensor | Fields] = {}
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        plain = [kl(p, r, kind).to(batch.dtype) for p, r in zip(log_probs, ref, strict=True)]
        ratios = [torch.exp(p - o) for p, o in zip(log_probs, old, strict=True)]
        unbiased = [kl(p, r, kind, w).to(batch.dtype) for p, r, w in zip(log_probs, ref, ratios, strict=True)]
        found |= {f"kl/{kind}": masked(plain, masks), f"kl/{kind}_unbiased": masked(unbiased, masks)}
    return found


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    record(Path(sys.argv[3]), Path(sys.argv[4]), "slime", sys.argv[2], compute)
