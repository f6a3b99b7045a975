"""Weights for servers that hold them in FP8: the trainer's weights, rounded anew in the format of the run's model
folder.

For a block of R × C numbers with the greatest magnitude a, the numbers × 448 / a are sent, rounded to float8_e4m3fn,
whose greatest number is 448, and the scale a / 448 (DeepSeek-V3 Technical Report, 2024, section 3.3.2). Where the
folder says `scale_fmt: ue8m0`, the scale is the next power of two. Weights that the folder does not hold in FP8 are
sent as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cairn.engines.models.folders import check_model_folder, open_weights, parameter_names
from cairn.engines.models.quantized import BlockFp8, Dequantized, quantization_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Fp8Weights:
    """Weights that a model folder, and servers that read it, hold in FP8."""

    scheme: BlockFp8
    names: frozenset[str]
    """Names of the weights, without those of `cairn.engines.models.published`."""

    @classmethod
    def of(cls, folder: str | Path) -> "Fp8Weights | None":
        """Return the FP8 weights of a folder; None where it has none. Raises BadModel."""
        check_model_folder(folder)
        scheme = quantization_of(Path(folder))
        if not isinstance(scheme, BlockFp8):
            return None
        quantized = {name for name, weight in open_weights(Path(folder)).items() if isinstance(weight, Dequantized)}
        return cls(scheme, frozenset(quantized & parameter_names(folder)))

    @property
    def scales(self) -> frozenset[str]:
        """Names of the scales."""
        return frozenset(map(_scale_of, self.names))

    def packed(self, buckets: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield buckets of whole weights, by the names in the folder's files, as servers accept them: scales next to
        weights."""
        for bucket in buckets:
            packed = {}
            for name, weight in bucket.items():
                if name in self.names:
                    packed[name], packed[_scale_of(name)] = quantize(weight, self.scheme)
                else:
                    packed[name] = weight
            yield packed


def _scale_of(name: str) -> str:
    return f"{name}_scale_inv"


def quantize(weight: torch.Tensor, scheme: BlockFp8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix of any float format as float8_e4m3fn, and the float32 scales of its blocks. A block that the
    matrix fills only in part has a scale too."""
    size = (scheme.rows, scheme.columns)
    rows, columns = (-(-length // part) for length, part in zip(weight.shape, size, strict=True))
    whole = torch.zeros(rows * size[0], columns * size[1], device=weight.device)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    blocks = whole.view(rows, size[0], columns, size[1])
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    if scheme.powers_of_two:
        scales = scales.log2().ceil().exp2()
    scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).view_as(whole)
    return scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scales
