"""The same models as the engines have."""

from tests.engines.rollout.conftest import model_folders, qwen3, qwen3_folder

__all__ = ["model_folders", "qwen3", "qwen3_folder"]
