"""A version leaves the trainer once, for one engine as for several: counted in the ranks of a fleet.

A loss of the user's, which every rank imports, counts what the rank gives to PyTorch's collective operations, to Ray's
object store and to broadcasts in the group with the engines.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from tests.engines.training.builders import make_batch
from tests.fleets import versions
from tests.ray_fixtures import fleet_config
from tests.sglang_server import sglang_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNTING = """
import os

from torch import distributed

from cairn.engines.training.weight_group import SendingGroup
from cairn.engines.training.weight_source import WeightSource


def count(owner, name, kind, tensors_of):
    call = getattr(owner, name)

    def counted(*args, **kwargs):
        result = call(*args, **kwargs)
        with open(os.path.join({folder!r}, str(os.getpid())), "a") as file:
            for tensor in tensors_of(args, result):
                file.write(f"{{kind}} {{tensor.nbytes}}\\n")
        return result

    setattr(owner, name, counted)


for name in ("broadcast", "send", "recv", "all_reduce", "gather", "all_gather"):
    count(distributed, name, "collective", lambda args, result: [args[0]])
count(distributed, "all_gather_into_tensor", "collective", lambda args, result: [args[1]])
count(WeightSource, "next_bucket", "stored", lambda args, result: result[0].values() if result[1] else ())
count(SendingGroup, "send", "broadcast", lambda args, result: [args[1]])


def loss(log_probs, tokens, config):
    return -log_probs * tokens.advantages, {{}}
"""

TRAINING = {"engine": "megatron", "world_size": 2, "megatron": {"tensor_model_parallel_size": 2}}


def counts(folder: Path) -> Counter[str]:
    """How often, and how many bytes, all ranks have given away since they started, by kind."""
    found: Counter[str] = Counter()
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            kind, nbytes = line.split()
            found += Counter({kind: 1, f"{kind} bytes": int(nbytes)})
    return found


def per_version(config: RunConfig, numbers: tuple[int, ...], folder: Path) -> Iterator[Counter[str]]:
    """Yield what a version costs when it is published and served by these numbers of engines."""
    with Fleet.start(config, name="counts", total_steps=len(numbers)) as fleet:
        for number in numbers:
            version = fleet.training.position().weight_version
            fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest="")
            before, served = counts(folder), versions(fleet)
            fleet.weights.publish(version + 1, keep=1)
            first, *others = fleet.rollout[:number]
            fleet.weights.serve(first, version + 1, others)
            assert versions(fleet) == [version + 1] * number + served[number:]
            yield counts(folder) - before


@pytest.mark.parametrize(
    ("engine", "transport", "numbers", "leaves"),
    [("transformers", "tensor", (1, 2, 4), "stored"), ("sglang", "distributed", (1, 2), "broadcast")],
)
def test_what_two_ranks_give_away_does_not_depend_on_the_number_of_engines(
    sglang_model: Path,
    ray_cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    transport: str,
    numbers: tuple[int, ...],
    leaves: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "counts").mkdir()
    (code := tmp_path / "counting.py").write_text(COUNTING.format(folder=str(folder)))
    rollout: dict[str, Any] = {"num_engines": max(numbers)}
    if engine == "sglang":
        rollout |= sglang_config().model_dump(include={"engine", "max_running_requests", "timeout", "sglang"})
    config = fleet_config(
        sglang_model,
        rollout=rollout,
        training=TRAINING,
        algorithm={"loss_type": f"{code}:loss"},
        fleet={"update_weight_transport": transport, "start_timeout": 600},
    )
    first, *others = per_version(config, numbers, folder)
    assert others == [first] * len(others)
    weights = sum(file.stat().st_size for file in sglang_model.glob("*.safetensors"))
    assert first[f"{leaves} bytes"] == pytest.approx(weights, rel=0.02)  # but for the head of the file
    assert first[leaves] > 1
    assert first["collective"] > 0
