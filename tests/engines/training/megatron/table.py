"""The parity table that docs/engines/megatron.md shows, as the last test run found it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.training.megatron.cases import Case

UNTRIED = {
    "EP and ETP together": "gloo gathers parts of equal size only, unlike experts' tokens",
    "EP, allgather dispatcher": "refused, for it needs as many tokens on every rank, which packed batches do not have",
    "overlap_param_gather": "refused, for weights must be whole when an update ends",
    "CUDA graphs, FP8, fused kernels, TEGroupedMLP, communication overlap of TP": "needs CUDA and Transformer Engine",
    "optimizer_cpu_offload": "its state, in test_host_optimizer.py; copies beside work need a GPU",
}
"""Modes without a row of figures, and why."""

PATH = Path("build/megatron-parity.md")


def write_table(
    rows: Sequence[tuple[Case, Mapping[str, float]]], bounds: Mapping[str, float], bfloat16: Mapping[str, float]
) -> Path:
    lines = [
        f"| layout | ranks | model | {' | '.join(bounds)} |",
        f"| --- | --- | --- |{' --- |' * len(bounds)}",
        f"| *bound in float32* | | | {' | '.join(f'{bound:.0e}' for bound in bounds.values())} |",
        f"| *bound in bfloat16* | | | {' | '.join(f'{bound:.0e}' for bound in bfloat16.values())} |",
    ]
    for case, found in rows:
        lines.append(
            f"| {case.name} | {case.ranks} | {case.family} | {' | '.join(f'{found[name]:.1e}' for name in bounds)} |"
        )
    lines += [
        f"| {name} | – | – | cannot run here: {reason} |{' |' * (len(bounds) - 1)}" for name, reason in UNTRIED.items()
    ]
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("\n".join(lines) + "\n")
    return PATH
