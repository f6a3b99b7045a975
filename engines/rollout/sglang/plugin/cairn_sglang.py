"""Plug-in of SGLang, loaded in each process of a server: checksums of the weights that a rank receives.

SGLang finds it by the entry point in the folder beside this file. It adds three actions to `/weights_checker`. SGLang
itself calls every rank and gathers their replies.

| action | `skip_tensor_list` | what a rank does |
| --- | --- | --- |
| `record DTYPE` | names of tensors that are not rounded | begins a record of what its model loads, rounded to DTYPE |
| `continue` | – | adds to the record the tensors of the one before it that were not loaded again |
| `recorded` | names to leave out | returns the record's checksum, under the name `recorded` |

A record has every tensor that the model is given to load, however it travelled. Its checksum is `weights_checksum` of
`cairn.engines.weights.fingerprint`, computed on the model's device.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

RECORD, CONTINUE, RECORDED = "record ", "continue", "recorded"

_spec = importlib.util.spec_from_file_location(
    "cairn_fingerprint", Path(__file__).parents[3] / "weights" / "fingerprint.py"
)
assert _spec is not None
assert _spec.loader is not None
fingerprint = importlib.util.module_from_spec(_spec)  # Cairn itself is not installed where SGLang is
_spec.loader.exec_module(fingerprint)


class Record:
    """Fingerprints of the tensors that a model is given to load.

    Args:
        dtype: number format that they are rounded to.
        exact: names of those that are not.
        before: the record before this one.
    """

    def __init__(self, model: Any, dtype: torch.dtype, exact: Collection[str], before: "Record | None" = None) -> None:
        self._model, self._load = model, type(model).load_weights
        self._device = next(model.parameters()).device
        self._dtype, self._exact = dtype, frozenset(exact)
        self._found: Any = fingerprint.Fingerprints()
        self._before: Any = None if before is None else before._found

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any) -> Any:
        """Have the model load tensors, and record those that it takes."""
        return self._load(self._model, self._recorded(named_tensors), *args, **options)

    def _recorded(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            dtype = None if name in self._exact else self._dtype
            self._found.add(name, tensor, dtype=dtype, device=self._device)
            yield name, tensor

    def continue_(self) -> None:
        """Begin with what the record before this one had found. Raises RuntimeError without one."""
        if self._before is None:
            raise RuntimeError("no record was begun before this one")
        self._found = self._before

    def checksum(self, left_out: Collection[str]) -> str:
        """Return the checksum of all recorded tensors but some."""
        return str(self._found.checksum(left_out))


def _handle(original: Callable[..., Any], checker: Any, **request: Any) -> Any:
    """Handle one request of `/weights_checker` on this rank."""
    from sglang.srt.utils.weight_checker import ChecksumInfo

    action, names = request["action"], request.get("skip_tensor_list") or ()
    if action.startswith(RECORD):
        model = checker._get_model()
        before = getattr(model.load_weights, "__self__", None)
        dtype = getattr(torch, action.removeprefix(RECORD))
        model.load_weights = Record(model, dtype, names, before if isinstance(before, Record) else None).load_weights
        return None
    if action not in (CONTINUE, RECORDED):
        return original(checker, **request)
    record = checker._get_model().load_weights.__self__
    if not isinstance(record, Record):
        raise RuntimeError("no record was begun")
    if action == CONTINUE:
        return record.continue_()
    checksum = record.checksum(frozenset(names))
    place = checker._parallelism_info(role=request["role"])
    return ChecksumInfo(checksums={RECORDED: checksum}, per_gpu_checksum=checksum, parallelism_info=place).model_dump()


def install() -> None:
    """Register the three actions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _handle, HookType.AROUND)
