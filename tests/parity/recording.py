"""What the scripts that record a peer's values have in common. Needs torch alone: it runs in the peer's environment."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Fields = list[torch.Tensor]
"""[T_i] of each sample."""

OWN = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 1.5, "gamma": 0.97, "lambd": 0.9, "kl_coef": 0.1}
OWN |= {"tis_clip": 1.3, "tis_clip_low": 0.8, "opd_kl_coef": 0.5, "value_clip": 0.3, "loss_scale_factor": 16}
OWN |= {"dppo_clip": 0.05, "dppo_clip_high": 0.08, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0, "clip_cov_ratio": 1.0}
OWN |= {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}
OWN |= {"opsm_delta": 0.02, "rs_veto_threshold": 0.6, "dpo_beta": 0.3, "dpo_label_smoothing": 0.2}
SEVERAL = {"rewards": 1.0, "sample_advantages": 0.5}
"""What stands in the batch for several rewards of a sample, and what each counts for."""
"""Options as they are named here, and the values that all are asked for."""


class Batch:
    """The batch in one precision."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        data = json.loads(path.read_text())
        self.dtype = dtype
        self.group_sizes: list[int] = data.pop("group_sizes")
        self._data = data

    @property
    def groups(self) -> list[int]:
        """The group of each sample."""
        return [group for group, size in enumerate(self.group_sizes) for _ in range(size)]

    def of_samples(self, name: str) -> torch.Tensor:
        """[N]."""
        return torch.tensor(self._data[name], dtype=self.dtype)

    def of_tokens(self, name: str) -> Fields:
        """[T_i] of each sample."""
        return [torch.tensor(field, dtype=self.dtype) for field in self._data[name]]

    def padded(self, name: str) -> torch.Tensor:
        """[N, T], zeros at the right."""
        return torch.nn.utils.rnn.pad_sequence(self.of_tokens(name), batch_first=True)


def record(
    path: Path, out: Path, peer: str, version: str, compute: Callable[[Batch], Mapping[str, torch.Tensor | Fields]]
) -> None:
    """Write the values of each case in both precisions."""
    values = {
        str(dtype).removeprefix("torch."): {name: _plain(found) for name, found in compute(Batch(path, dtype)).items()}
        for dtype in (torch.float32, torch.float64)
    }
    lines = [
        f" {json.dumps(dtype)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in of.items())
        + "\n }"
        for dtype, of in values.items()
    ]
    head = f' "peer": {json.dumps(peer)},\n "version": {json.dumps(version)},\n'
    out.write_text("{\n" + head + ",\n".join(lines) + "\n}\n")


def _plain(found: torch.Tensor | Fields) -> Any:
    return found.tolist() if isinstance(found, torch.Tensor) else [field.tolist() for field in found]
