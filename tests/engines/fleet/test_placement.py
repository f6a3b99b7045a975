"""Ranks and engines over several machines: who is beside whom, on which devices, and after a machine is lost.

Simulated machines, see `simulated_machines`; no engine is started.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import ray

from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.cluster import Cluster, ClusterError, seconds_until_drained
from cairn.engines.fleet.placement import Placement
from cairn.engines.fleet.roles import ActorRole, Bundle, BundlePlace, Slot, arrange
from cairn.engines.types.errors import EngineDied
from tests.engines.fleet.simulated_machines import Machines, add, drain, lose, simulated_machines, slots
from tests.engines.fleet.tiny_actor import Tiny
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

TO_START = 240
"""Seconds that actors may take, a dozen at once on a machine that does much else."""


def megatron(world_size: int, **options: int) -> dict[str, Any]:
    return {"engine": "megatron", "world_size": world_size, "num_gpus_per_rank": 1, "megatron": options}


def sglang(num_engines: int, num_gpus: float, **options: Any) -> dict[str, Any]:
    return {
        "engine": "sglang",
        "num_engines": num_engines,
        "num_gpus_per_engine": num_gpus,
        "num_rollout": 4,
        "rollout_batch_size": 48,
        "rollout_max_response_len": 24,
        **options,
    }


COLOCATED = {"colocate": True}
TP8 = megatron(24, tensor_model_parallel_size=8)
TP4 = megatron(24, tensor_model_parallel_size=4)
"""On three machines of 8, or two of 12."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with simulated_machines() as machines:
        yield machines


@pytest.mark.slow
def test_ranks_engines_and_guests_are_where_they_must_be_on_three_machines_of_eight(machines: Machines) -> None:
    machines.have([8, 8, 8])
    actual = machines.do(slots, training=TP8, rollout=sglang(6, 4), fleet=COLOCATED)
    require_in_order(actual["training"], [8, 8, 8])
    require_guests(actual, 4)
    single = machines.do(slots, training=megatron(24), rollout=sglang(1, 0))
    require_in_order(single["training"], [8, 8, 8])  # above 16 bundles Ray's own order is none
    apart = machines.do(
        slots, training=megatron(8, tensor_model_parallel_size=4), rollout=sglang(1, 16, num_gpus_per_node=8)
    )
    require_in_order(apart["training"], [8])
    require_whole_machines(apart["rollout"], 8)
    require_nothing_shared(apart)


@pytest.mark.slow
def test_equal_bundles_keep_colocated_engines_beside_their_ranks_on_two_machines_of_twelve(machines: Machines) -> None:
    machines.have([12, 12])
    actual = machines.do(slots, training=TP4, rollout=sglang(6, 4), fleet=COLOCATED)
    require_in_order(actual["training"], [12, 12])
    require_guests(actual, 4)
    apart = machines.do(
        slots,
        training=megatron(12, tensor_model_parallel_size=4),
        rollout=sglang(1, 12, num_gpus_per_node=12),
    )
    require_in_order(apart["training"], [12])
    require_nothing_shared(apart)
    with pytest.raises(ClusterError, match=r"no machines for training: 3 × \(8 CPU, 8 GPU\) must each be on one"):
        machines.do(slots, training=TP8, rollout=sglang(1, 0))


@pytest.mark.slow
def test_groups_of_ranks_stay_whole_on_eight_machines_of_eight(machines: Machines) -> None:
    machines.have([8] * 8)
    experts = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "sequence_parallel": True}
    for options in ({"tensor_model_parallel_size": 8}, {"tensor_model_parallel_size": 4}, experts, {}):
        batches = {"rollout_batch_size": 64}
        actual = machines.do(slots, training=megatron(64, **options), rollout=sglang(8, 8, **batches), fleet=COLOCATED)
        require_in_order(actual["training"], [8] * 8)
        require_guests(actual, 8)
        half = machines.do(slots, training=megatron(32, **options), rollout=sglang(2, 16, **batches))
        require_in_order(half["training"], [8] * 4)
        require_whole_machines(half["rollout"], 8)
        require_nothing_shared(half)


def require_in_order(ranks: Sequence[Slot], machines: Sequence[int]) -> None:
    """Ranks fill machine after machine, device after device."""
    rest = list(ranks)
    for size in machines:
        here, rest = rest[:size], rest[size:]
        assert [slot.gpu_ids for slot in here] == [(str(gpu),) for gpu in sorted(gpu_numbers(here))]
        assert {slot.node for slot in here} == {here[0].node}
    assert not rest
    assert len({slot.node for slot in ranks}) == len(machines)
    assert len({(slot.node, slot.gpu_ids) for slot in ranks}) == len(ranks)


def require_guests(actual: dict[str, list[Slot]], each: int) -> None:
    """Every engine has the devices of its ranks, in their order."""
    for index, engine in enumerate(actual["rollout"]):
        ranks = actual["training"][index * each : (index + 1) * each]
        assert engine.gpu_ids == tuple(gpu for rank in ranks for gpu in rank.gpu_ids)
        assert {engine.node} == {rank.node for rank in ranks}
        assert engine.bundle in {rank.bundle for rank in ranks}


def require_whole_machines(parts: Sequence[Slot], gpus: int) -> None:
    """Every part of an engine has a machine for itself, one after the other in order of address."""
    assert [sorted(gpu_numbers([part])) for part in parts] == [list(range(gpus))] * len(parts)
    assert len({part.node for part in parts}) == len(parts)
    assert all(one.node < other.node for one, other in pairwise(parts))  # the address is the same here


def require_nothing_shared(actual: dict[str, list[Slot]]) -> None:
    devices = Counter((slot.node, gpu) for role in actual.values() for slot in role for gpu in slot.gpu_ids)
    assert set(devices.values()) == {1}


def gpu_numbers(slots: Sequence[Slot]) -> list[int]:
    return [int(gpu) for slot in slots for gpu in slot.gpu_ids]


def live_through_the_loss_of_a_machine() -> None:
    """Four pairs of ranks on two machines, a guest in each pair; one machine goes and another one comes."""
    training = ActorRole("training", Tiny, (Bundle(0.1, 1, actors=2, guest_cpus=0.1),) * 4, 1, "a", "options")
    hosts = tuple(range(2 * pair, 2 * pair + 2) for pair in range(4))
    rollout = ActorRole("rollout", Tiny, (Bundle(0.1, 2),) * 4, 1, "b", "options", training, hosts)
    placement = Placement("lost", [training, rollout], Cluster("joined"), Deadline(TO_START))
    ranks, guests = placement.actors(training), placement.actors(rollout)

    def require_in_place(expected: Sequence[Slot]) -> None:
        seen = [ray.get(actor.callee().call(Tiny.health), timeout=TO_START) for actor in (*ranks, *guests)]
        assert seen == [(slot.node, ",".join(slot.gpu_ids)) for slot in expected]

    def where() -> list[Slot]:
        actors = [(training, i) for i in range(8)] + [(rollout, i) for i in range(4)]
        return [placement.slot(role, i, Deadline(TO_START)) for role, i in actors]

    before = where()
    for actor in (*ranks, *guests):
        actor.create(Deadline(TO_START))
    require_in_place(before)
    lost = before[0].node
    lose(lost)
    with pytest.raises(EngineDied):
        # until Ray misses it
        wait_for(lambda: result(ranks[0].callee().call(Tiny.health), Deadline(TO_START), "health()") is None)
    with pytest.raises(ClusterError, match="did not make room for training again"):
        wait_for(lambda: placement.slot(training, 0, Deadline(5)) not in before)  # as long as Ray has not missed it
    stayed = [slot for slot in before if slot.node != lost]
    assert placement.slot(training, 7, Deadline(5)) in stayed  # nobody waits for a machine that is not its own
    add(8)
    after = where()
    assert [new for old, new in zip(before, after, strict=True) if old.node != lost] == stayed
    for actor, old in zip((*ranks, *guests), before, strict=True):
        if old.node == lost:
            actor.create(Deadline(120))
    require_in_place(after)
    placement.remove(Deadline(TO_START))


@pytest.mark.slow
def test_after_the_loss_of_a_machine_its_actors_alone_have_other_slots(machines: Machines) -> None:
    machines.have([4, 4])
    machines.do(live_through_the_loss_of_a_machine)


def learn_that_a_machine_is_drained() -> None:
    """Of two machines with a rank each."""
    role = ActorRole("training", Tiny, (Bundle(0.1, 4),) * 2, 1, "a", "options")
    placement = Placement("drained", [role], Cluster("joined"), Deadline(TO_START))
    for actor in placement.actors(role):
        actor.create(Deadline(TO_START))
    going, staying = (placement.slot(role, rank, Deadline(TO_START)).node for rank in range(2))
    assert placement.nodes() == {going, staying}
    assert seconds_until_drained(placement.nodes()) is None
    drain(going, 60)
    left = wait_for(lambda: seconds_until_drained(placement.nodes()))
    assert 0 < left <= 60
    assert seconds_until_drained({staying}) is None
    placement.remove(Deadline(TO_START))


@pytest.mark.slow
def test_a_machine_that_ray_is_told_to_drain_is_known_with_the_seconds_that_are_left(machines: Machines) -> None:
    machines.have([4, 4])
    machines.do(learn_that_a_machine_is_drained)


def test_bundles_are_dealt_in_the_order_of_machines_and_devices_and_only_moved_ones_again() -> None:
    shapes = ["pair"] * 5 + ["one"]
    where = {
        0: BundlePlace("b", "10.0.0.10", ("2", "3")),
        1: BundlePlace("a", "10.0.0.9", ("10", "11")),
        2: BundlePlace("a", "10.0.0.9", ("8", "9")),
        3: BundlePlace("b", "10.0.0.10", ("0", "1")),
        4: BundlePlace("a", "10.0.0.9", ("0", "1")),
        5: BundlePlace("a", "10.0.0.9", ("2",)),
    }
    order = arrange(shapes, where, (), where)
    assert order == (4, 2, 1, 3, 0, 5)
    where |= {bundle: BundlePlace("c", "10.0.0.1", (str(7 - bundle),)) for bundle in (1, 2, 4)}
    assert arrange(shapes, where, order, [1, 2, 4]) == (4, 2, 1, 3, 0, 5)
    where |= {3: BundlePlace("c", "10.0.0.1", ("6",)), 0: BundlePlace("c", "10.0.0.1", ("5",))}
    assert arrange(shapes, where, order, [3, 0]) == (4, 2, 1, 0, 3, 5)
