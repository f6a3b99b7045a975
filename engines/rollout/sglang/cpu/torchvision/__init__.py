"""Let the real torchvision load next to a PyTorch without CUDA.

Its compiled library is linked to CUDA and cannot load. Its Python part then lacks the schemas of two operators that the
library would have registered. This module declares them. Everything else is the real package, which comes after this
folder on the path. SGLang imports it for multimodal models and calls neither operator.
"""

import importlib.machinery
import sys
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_own = Path(__file__).resolve().parents[1]
_real = importlib.machinery.PathFinder.find_spec(
    "torchvision", [p for p in sys.path if Path(p or ".").resolve() != _own]
)
assert _real is not None
assert _real.loader is not None
__path__ = list(_real.submodule_search_locations or [])
_real.loader.exec_module(sys.modules[__name__])
