"""A recipe that sets what is required and little else."""

from pathlib import Path

import pytest

RECIPE = """\
model: {path: some/model}
data: {path: train.jsonl}
rollout:
  num_rollout: 2
  rollout_batch_size: 4
  rollout_max_response_len: 16
eval:
  eval_interval: 1
  benchmarks:
    - {name: heldout, path: test.jsonl, max_response_len: 16}
training:
  lr: 1e-4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
