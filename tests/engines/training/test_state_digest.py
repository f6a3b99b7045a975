from collections.abc import Callable

import pytest
import torch

from cairn.engines.training.sharding import state_digest

State = dict[str, torch.Tensor]


def state() -> State:
    draw = torch.Generator().manual_seed(0)
    return {
        "parameters.a": torch.randn(5, 7, generator=draw),
        "parameters.b": torch.randn(5, 7, generator=draw),
        "exp_avg.a": torch.randn(5, 7, generator=draw),
    }


def flip_a_bit(tensors: State) -> None:
    tensors["exp_avg.a"].view(torch.int32)[2, 3] ^= 1


def swap_two_elements(tensors: State) -> None:
    flat = tensors["parameters.a"].view(-1)
    flat[[3, 9]] = flat[[9, 3]]


def swap_two_tensors(tensors: State) -> None:
    tensors["parameters.a"], tensors["parameters.b"] = tensors["parameters.b"], tensors["parameters.a"]


def swap_a_parameter_and_its_moment(tensors: State) -> None:
    tensors["parameters.a"], tensors["exp_avg.a"] = tensors["exp_avg.a"], tensors["parameters.a"]


def reshape(tensors: State) -> None:
    tensors["parameters.a"] = tensors["parameters.a"].view(7, 5)


def drop(tensors: State) -> None:
    del tensors["parameters.b"]


@pytest.mark.parametrize(
    "change",
    [flip_a_bit, swap_two_elements, swap_two_tensors, swap_a_parameter_and_its_moment, reshape, drop],
)
def test_the_digest_changes_with(change: Callable[[State], None]) -> None:
    tensors = state()
    before = state_digest(tensors.items(), 3, world_size=1)
    change(tensors)
    assert state_digest(tensors.items(), 3, world_size=1) != before


def test_the_digest_changes_with_the_weight_version() -> None:
    assert state_digest(state().items(), 3, world_size=1) != state_digest(state().items(), 4, world_size=1)


def test_the_digest_does_not_depend_on_the_order_of_tensors() -> None:
    tensors = state()
    assert state_digest(tensors.items(), 3, 1) == state_digest(reversed(tensors.items()), 3, 1)
