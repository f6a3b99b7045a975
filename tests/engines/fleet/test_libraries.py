"""Training ranks have the environment variables that their libraries need."""

import os
from pathlib import Path

import ray

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.fleet.actors import EngineActor, TrainingActor
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fencing import NO_CLAIM
from cairn.engines.fleet.roles import Slot
from cairn.engines.fleet.training import RANK
from cairn.engines.processes.libraries import table
from cairn.engines.training.rank import TrainingRank


class Reading(TrainingActor):
    """A rank's process that also returns its environment variables."""

    def variables(self) -> dict[str, str]:
        return dict(os.environ)


def test_the_process_of_a_rank_has_the_variables_of_the_table_and_of_its_options(
    ray_cluster: Cluster, tiny_assets: Path
) -> None:
    training = TrainingConfig(num_threads=1, train_env_vars={"NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": "1"})
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(concurrency_groups={"control": 1})(Reading).options(num_cpus=0)  # type: ignore[call-overload]
    rank = actor.remote(NO_CLAIM, 1, Slot(0, node, "127.0.0.1", ()))

    def call(method: str, *arguments: object) -> "ray.ObjectRef[dict[str, str]]":
        return rank.obey.remote(NO_CLAIM, method, *arguments)

    model = ModelConfig(path=str(tiny_assets / "model"))
    ray.get(call(EngineActor.make.__name__, RANK, "127.0.0.1", training), timeout=240)
    ray.get(call(TrainingRank.start.__name__, model, AlgorithmConfig(), 1.0, 1, 0, None), timeout=240)
    actual = ray.get(call("variables"), timeout=60)
    ray.kill(rank)

    wanted = {row.variable: row.value for row in table() if "trainer" in row.processes and row.holds(training)}
    assert {"NCCL_CUMEM_ENABLE", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"} <= wanted.keys()
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in wanted
    wanted |= training.train_env_vars
    assert {name: actual.get(name) for name in wanted} == wanted
