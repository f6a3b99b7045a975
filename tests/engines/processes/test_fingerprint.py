"""What an engine says that it computes on."""

import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.processes.fingerprint import combined, cpu_model, engine_environment, server_environment
from cairn.engines.rollout.sglang.installation import Installation, SGLangMissing
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.torch.engine import TorchEngine
from cairn.storage.records import Environment, code_version
from tests.engines.training.builders import model_folder
from tests.ray_fixtures import fleet_config


def test_the_processor_is_named_as_the_kernel_names_it() -> None:
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    assert cpu_model() == (named[0].split(": ", 1)[1] if named else platform.machine())


def test_engines_name_processor_instructions_threads_and_what_they_compute_with(tmp_path: Path) -> None:
    config = fleet_config(model_folder(tmp_path))
    trainer = TorchEngine(config.model, config.training, config.algorithm, temperature=1.0, total_steps=1)
    sampler = TransformersEngine(config.model.path, config.rollout)
    for environment in (trainer.environment(), sampler.environment()):
        assert environment.device == f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
        assert environment.threads == torch.get_num_threads() == 1
        assert environment.host == platform.node()
        assert environment.versions["torch"] == version("torch")
        assert environment.versions["transformers"] == version("transformers")
        assert environment.versions["cairn-rl"].startswith(code_version().package)


def test_a_server_has_the_versions_of_its_own_interpreter() -> None:
    try:
        installation = Installation.find()
    except SGLangMissing as missing:
        pytest.skip(f"{missing}")
    environment = server_environment(True, 1, installation.versions(("sglang", "torch", "no-such-package")))
    assert environment.versions["sglang"] == installation.version
    assert set(environment.versions) == {"python", "sglang", "torch", "cairn-rl", "MKL_CBWR"}


def test_a_server_on_a_cpu_says_how_mkl_chooses_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert server_environment(True, 1, {}).versions["MKL_CBWR"] == "COMPATIBLE"
    assert "MKL_CBWR" not in server_environment(False, 1, {}).versions


def test_megatron_is_among_what_its_engine_computes_with() -> None:
    from cairn.engines.processes.fingerprint import MEGATRON

    assert engine_environment("cpu", MEGATRON).versions["megatron-core"] == version("megatron-core")


def test_what_computes_together_says_where_it_differs() -> None:
    one = Environment(device="A", threads=2, host="n1", versions={"torch": "1", "numpy": "2"})
    assert combined([one, one]) == one
    other = Environment(device="B", threads=4, host="n2", versions={"torch": "1"})
    assert combined([one, other]) == combined([other, one])
    both = combined([one, other])
    assert (both.device, both.threads, both.host) == ("A + B", 0, "n1 + n2")
    assert both.versions == {"torch": "1", "numpy": "2 + none"}


def test_threads_are_those_that_the_engine_was_given(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        engine = TransformersEngine(
            str(model_folder(tmp_path)),
            RolloutConfig(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=8, num_threads=2),
        )
        assert engine.environment().threads == 2
    finally:
        torch.set_num_threads(before)
