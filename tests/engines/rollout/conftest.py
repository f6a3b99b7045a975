from pathlib import Path

import pytest

from cairn.engines.rollout.transformers.engine import TransformersEngine
from tests.engines.rollout.models import configs, rollout_config, save_model


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in configs().items()}


@pytest.fixture
def qwen3(model_folders: dict[str, str]) -> TransformersEngine:
    return TransformersEngine(model_folders["qwen3"], rollout_config())


@pytest.fixture
def qwen3_folder(model_folders: dict[str, str]) -> Path:
    return Path(model_folders["qwen3"])
