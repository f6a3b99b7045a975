"""Real SGLang servers that share memory with the trainer find weights that did not arrive as they were published."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.weights.exchange import WeightExchange
from cairn.engines.fleet.weights.transports import transport_of
from cairn.engines.rollout.base import DirectReceiver, LoadChecked
from cairn.engines.types.errors import WeightsDiffer
from cairn.engines.weights.buckets import share
from cairn.tasks.trainer.sync import publish, serve
from tests.engines.training.builders import make_batch
from tests.fleets import verify, versions
from tests.sglang_server import sglang_config
from tests.tiny_run import tiny_config, tiny_context

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    rollout = sglang_config().model_dump(include={"engine", "sglang", "max_running_requests", "timeout"})
    shared = {"colocate": True, "check_weight_update_equal": True, "update_weight_buffer_size": 100_000}
    shared |= {"start_timeout": 400, "call_timeout": 120}
    algorithm = {"use_rollout_logprobs": False}
    return tiny_config(tiny_assets, rollout=rollout | {"num_engines": 2}, fleet=shared, algorithm=algorithm)


@pytest.fixture(scope="module")
def fleet(config: RunConfig, ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("verification"))
        with Fleet.start(config, name="verification", total_steps=10) as fleet:
            for engine in fleet.rollout:  # what GPUs would be: here the memory is the machine's
                engine.ranks = range(1)
            fleet.weights._transport = transport_of(config.fleet, fleet.training, load_timeout=60, maps_gpu_memory=True)
            yield fleet


@contextmanager
def on_the_way(
    engine: RolloutHandle, patch: pytest.MonkeyPatch, strike: Callable[[Tensors], Tensors], bucket: int = 1
) -> Iterator[list[None]]:
    """Strike what an engine maps of one bucket, once. Yields a list that has an element for each strike."""
    struck: list[None] = []
    call, seen = engine.call, iter(range(10**6))

    def altered(group: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is DirectReceiver.map_weights and next(seen) == bucket and not struck:
            struck.append(None)
            names, (handle,) = args
            sent = strike([(name, tensor.clone()) for name, tensor in ForkingPickler.loads(handle)])
            kept.update((name, tensor.clone()) for name, tensor in sent)
            args = names, [share(kept)]
        return call(group, method, *args, **kwargs)

    kept: dict[str, torch.Tensor] = {}  # as long as the server maps them
    patch.setattr(engine, "call", altered)
    try:
        yield struck
    finally:  # PyTorch ends a process that releases shared memory after the process that manages it has ended
        kept.clear()


def with_an_altered_byte(sent: Tensors) -> Tensors:
    sent[-1][1].view(-1).view(torch.uint8)[5] ^= 1
    return sent


def without_a_tensor(sent: Tensors) -> Tensors:
    return sent[:-1]


@pytest.mark.parametrize("strike", [with_an_altered_byte, without_a_tensor])
def test_weights_that_a_colocated_server_did_not_receive_as_published_are_sent_again(
    fleet: Fleet, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Tensors]
) -> None:
    found: list[str] = []
    serving = WeightExchange.serve

    def recorded(*args: Any, **kwargs: Any) -> None:
        try:
            serving(*args, **kwargs)
        except WeightsDiffer as error:
            found.append(str(error))
            raise

    monkeypatch.setattr(WeightExchange, "serve", recorded)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):  # type: ignore[arg-type]
        publish(run, None)
        first, second = fleet.rollout
        serve(run, first, None, beside=[second])
        assert versions(fleet) == [0, 0]
        assert not found
        publish(run, None)
        assert versions(fleet) == [None, None], "the servers gave their memory to training"
        with on_the_way(second, monkeypatch, strike) as struck:
            serve(run, first, None, beside=[second])
            serve(run, second, None)
    assert struck
    (error,) = found
    assert error.startswith("rollout:1 received weights with checksum")
    assert "version 0 was published with" in error
    assert versions(fleet) == [0, 0]
    fleet.training.onload()
    verify(fleet)


def test_one_of_two_servers_that_keeps_older_weights_is_found(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.turns.for_training()
    older = {name: tensor for bucket in exported(fleet) for name, tensor in bucket}
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
    fleet.weights.publish(version + 1, keep=2)
    first, second = fleet.rollout
    with (
        on_the_way(second, monkeypatch, lambda sent: [(name, older[name]) for name, _ in sent]) as struck,
        pytest.raises(WeightsDiffer, match="rollout:1 received weights"),
    ):
        fleet.weights.serve(first, version + 1, beside=[second])
    assert struck
    assert versions(fleet) == [version + 1, None], "one serves what was published, the other nothing"


def test_a_server_that_makes_other_weights_of_what_it_received_is_found_beside_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = fleet.training.position().weight_version
    fleet.weights.publish(version, keep=2)
    first, second = fleet.rollout
    url, call = second.health()["url"], second.call

    def altered(group: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is LoadChecked.loaded_checksum:
            body = {"action": "reset_tensors", "skip_tensor_list": ["layers.1", "embed", "mlp", "proj"]}
            httpx.post(f"{url}/weights_checker", json=body, timeout=60).raise_for_status()
        return call(group, method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(second, "call", altered)
        with pytest.raises(WeightsDiffer, match=r"rollout:1 and rollout:0 received the same weights .* hold different"):
            fleet.weights.serve(first, version, beside=[second])
    assert versions(fleet) == [version, None]
    assert first.suspect
    assert second.suspect, "which of them is right is unknown: both are replaced"
    first.suspect = second.suspect = False  # here it is known
    fleet.weights.publish(version, keep=2)
    fleet.weights.serve(first, version, beside=[second])
    assert versions(fleet) == [version, version]


def exported(fleet: Fleet) -> Iterator[Tensors]:
    version = fleet.training.position().weight_version
    for shared in fleet.training.share_weights(version, 100_000):
        yield [(name, tensor.clone()) for name, tensor in ForkingPickler.loads(shared[0][1])]
