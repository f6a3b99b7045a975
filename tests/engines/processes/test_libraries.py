"""Which value an environment variable has where machine, table and configuration differ."""

import pytest
from pydantic import ValidationError

from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.libraries import environment, problems, table
from tests.sglang_server import sglang_config


def test_the_configuration_overrides_the_machine_which_overrides_values_that_are_not_fixed() -> None:
    machine = {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1", "NCCL_ALGO": "Tree", "HOME": "/root"}
    training = TrainingConfig(train_env_vars={"NCCL_CUMEM_ENABLE": "2"})
    made = environment("trainer", machine, training.train_env_vars, training)
    assert {name: made[name] for name in machine} == {
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_CUMEM_ENABLE": "2",
        "NCCL_ALGO": "Ring",
        "HOME": "/root",
    }
    free = TrainingConfig(deterministic_mode=False)
    assert environment("trainer", machine, {}, free)["NCCL_ALGO"] == "Tree"
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert environment("trainer", {}, {}, free).items() >= allocator.items()
    assert not environment("sglang", allocator, {}).keys() & allocator.keys()


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_kernels_run_in_the_order_of_their_launch_for_megatron_alone(engine: str) -> None:
    training = TrainingConfig.model_validate({"engine": engine})
    assert environment("trainer", {}, {}, training).get("CUDA_DEVICE_MAX_CONNECTIONS") == (
        "1" if engine == "megatron" else None
    )


def test_a_value_that_cannot_have_its_effect_is_rejected() -> None:
    rollout = RolloutConfig.model_validate(
        sglang_config().model_dump()
        | {"sglang_env_vars": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": True, "SGLANG_LOG_GC": True}}
    )
    assert rollout.sglang_env_vars["SGLANG_LOG_GC"] == "true"
    training = TrainingConfig(train_env_vars={"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "8", "LD_PRELOAD": "a.so"})
    found = list(problems(rollout, training))
    assert len(found) == 4
    for name in ("training.train_env_vars.NCCL_ALGO", "OMP_NUM_THREADS", "LD_PRELOAD", "HEALTH_ENDPOINT_GENERATION"):
        assert any(name in problem for problem in found), name
    assert not list(problems(sglang_config(), TrainingConfig(train_env_vars={"NCCL_DEBUG": "INFO"})))


@pytest.mark.parametrize("variables", [{"HF_TOKEN": "x"}, {"WANDB_API_KEY": "x"}, {"A B": "x"}, {"A": ["x"]}])
def test_secrets_and_what_is_no_variable_are_rejected(variables: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"secret|no name|string"):
        TrainingConfig.model_validate({"train_env_vars": variables})


def test_every_row_has_a_source_and_is_alone() -> None:
    rows = [(row.variable, kind) for row in table() for kind in row.processes]
    assert len(rows) == len(set(rows))
    assert all(row.why and row.source for row in table())
