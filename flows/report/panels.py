"""Which metrics are drawn together. One that a run does not have is left out, and so is a panel without any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cairn.flows.reading.metrics import find_metric


@dataclass(frozen=True)
class Panel:
    """Curves over the iterations that share an axis."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    """(metric as `docs/metrics.md` names it, what the legend says)"""
    log: bool = False
    """Whether the axis is logarithmic."""
    needs: str = ""
    """A metric without which the panel says nothing."""


PANELS = (
    Panel(
        "Reward",
        "",
        (("rollout/raw_reward", "all samples generated"), ("rollout/trained/raw_reward", "those trained on")),
    ),
    Panel("Entropy", "nats a token", (("train/entropy_loss", "policy"),)),
    Panel(
        "KL divergence",
        "nats a token",
        (
            ("train/ppo_kl", "old ‖ current"),
            ("train/kl_loss", "from the reference, in the loss"),
            ("rollout/kl", "from the reference, in the reward"),
            ("rollout/opd_reverse_kl", "from the teacher"),
        ),
    ),
    Panel(
        "Response length",
        "tokens",
        (
            ("rollout/response_len/mean", "mean"),
            ("rollout/response_len/median", "median"),
            ("rollout/response_len/max", "longest"),
        ),
    ),
    Panel("Policy loss", "", (("train/loss", "loss"), ("train/pg_loss", "policy"))),
    Panel(
        "Preferences",
        "nats",
        (
            ("rollout/dpo/rewards/margins", "mean margin"),
            ("rollout/dpo/rewards/chosen", "preferred"),
            ("rollout/dpo/rewards/rejected", "the others"),
        ),
        needs="rollout/dpo/rewards/margins",
    ),
    Panel("Critic", "reward²", (("train/value_loss", "value loss"),)),
    Panel(
        "Values",
        "reward",
        (("rollout/values", "mean value"), ("rollout/returns", "mean return")),
        needs="rollout/values",
    ),
    Panel(
        "Gradient norm",
        "",
        (("train/grad_norm", "before clipping"), ("train/critic_grad_norm", "critic, before clipping")),
    ),
    Panel("Learning rate", "", (("train/lr", "policy"), ("train/critic_lr", "critic"))),
    Panel(
        "Clipped tokens",
        "fraction",
        (
            ("train/pg_clipfrac", "ratio"),
            ("train/tis_clipfrac", "importance weight"),
            ("train/value_clipfrac", "value"),
        ),
    ),
    Panel(
        "Trainer and rollout engine",
        "nats a token",
        (
            ("train/train_rollout_logprob_abs_diff", "mean difference of log-probs"),
            ("train/train_rollout_logprob_abs_diff_max", "largest"),
        ),
        log=True,
    ),
    Panel("Truncated responses", "fraction", (("rollout/truncated_ratio", "of all samples generated"),)),
    Panel(
        "Calls of the policy", "a sample", (("rollout/policy_calls/mean", "mean"), ("rollout/policy_calls/max", "most"))
    ),
    Panel("Tool calls", "calls", (("rollout/tool_calls", "made"), ("rollout/tool_failures", "failed"))),
    Panel("Given by the world", "fraction", (("rollout/world_tokens_ratio", "of response tokens"),)),
    Panel("Age of trained tokens", "publications", (("age/mean", "mean"), ("age/max", "oldest"))),
    Panel("Throughput", "tokens/s", (("perf/tokens_per_gpu_per_sec", "generated, of one engine or GPU"),)),
)

_OFTEN_ZERO = {"age/mean", "age/max", "train/tis_clipfrac", "train/value_clipfrac"}
"""Say something only where they are not zero throughout."""


def chosen_panels(metrics: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    """The panels of a run, with what each metric means, as the page's scripts take them. Of equal curves the first is
    drawn."""
    panels = []
    for panel in PANELS:
        curves, drawn = [], list[Sequence[float]]()
        for name, label in panel.curves:
            if name in metrics and (name not in _OFTEN_ZERO or any(metrics[name])) and metrics[name] not in drawn:
                curves.append({"metric": name, "label": label, "meaning": meaning(name)})
                drawn.append(metrics[name])
        if curves and (not panel.needs or panel.needs in metrics):
            panels.append({"title": panel.title, "unit": panel.unit, "curves": curves, "log": panel.log})
    return panels


def meaning(name: str) -> str:
    """What a metric is, in one sentence with its unit; nothing of one that is not ours."""
    metric = find_metric(name)
    return "" if metric is None else f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning
