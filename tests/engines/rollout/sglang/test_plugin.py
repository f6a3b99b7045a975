"""The record that a server's plug-in makes of weights, in this process; tests of fleets make it in real servers."""

import importlib.util
from collections.abc import Iterable
from types import ModuleType

import pytest
import torch

from cairn.engines.rollout.sglang.installation import PLUGIN
from cairn.engines.weights.fingerprint import weights_checksum

BIAS = "mlp.gate.e_score_correction_bias"
SENT = {
    "a.weight": torch.randn(70, 1000, generator=torch.Generator().manual_seed(0)),
    "b.weight": torch.randn(3000, 1500, generator=torch.Generator().manual_seed(1)),  # more than at a time
    BIAS: torch.randn(8, generator=torch.Generator().manual_seed(2)),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.names: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, _ in weights:
            if name == "refused":
                raise ValueError(name)
            self.names.append(name)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    """Loaded as SGLang does: by its file."""
    spec = importlib.util.spec_from_file_location("cairn_sglang", PLUGIN / "cairn_sglang.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_record_is_of_weights_as_a_server_rounds_them_but_for_exact_ones(plugin: ModuleType) -> None:
    model = Model()
    record = plugin.Record(model, torch.bfloat16, [BIAS])
    for name, tensor in SENT.items():
        record.load_weights([(name, tensor)])
    assert model.names == list(SENT)
    rounded = {name: tensor.bfloat16() for name, tensor in SENT.items()} | {BIAS: SENT[BIAS]}
    assert record.checksum([]) == weights_checksum(rounded.items())
    assert record.checksum([]) != weights_checksum(SENT.items())
    assert record.checksum(["a.weight"]) == weights_checksum((n, t) for n, t in rounded.items() if n != "a.weight")


def test_a_record_has_the_last_tensor_of_a_name_and_all_that_came_before_a_failure(plugin: ModuleType) -> None:
    record = plugin.Record(Model(), torch.float32, [])
    assert record.checksum([]) == weights_checksum({}.items())
    record.load_weights(SENT.items())
    older = SENT | {"a.weight": SENT["a.weight"] + 1}
    record.load_weights([("a.weight", older["a.weight"])])
    assert record.checksum([]) == weights_checksum(older.items())
    with pytest.raises(ValueError, match="refused"):
        record.load_weights([("refused", torch.zeros(1))])
    assert record.checksum(["refused"]) == weights_checksum(older.items())
