"""The GPUs that a recipe names, beside those that a cluster has."""

from typing import get_args

import pytest

from cairn.configs.catalogue import gpu_names
from cairn.configs.schema.operations import GpuName
from cairn.engines.fleet.requirements import gpu_problem


def machine(device: str) -> dict[str, float]:
    return {"CPU": 64.0, "GPU": 8.0, f"accelerator_type:{device}": 1.0}


def test_a_recipe_can_name_every_gpu_of_the_table() -> None:
    assert sorted(get_args(GpuName)) == gpu_names()


def test_machines_with_less_memory_than_the_recipe_counts_on_are_refused() -> None:
    problem = gpu_problem("h200", [{"CPU": 8.0}, machine("H200"), machine("H100")])
    assert problem is not None
    assert "fleet.gpu is h200, with 140 GiB, and the cluster has GPUs of the type H100, with 80 GiB" in problem


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("h100", "H100"),
        ("h100", "H200"),
        ("a100-80gb", "A100"),  # which may be the larger one
        ("h200", "RTX-PRO-6000"),  # not in the table
        (None, "L40S"),
    ],
)
def test_other_machines_are_not(gpu: str | None, device: str) -> None:
    assert gpu_problem(gpu, [machine(device)]) is None
