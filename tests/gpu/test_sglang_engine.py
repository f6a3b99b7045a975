"""SGLang's servers on a GPU. Needs `sglang==0.5.23` beside Cairn."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import GenerateRequest, SamplingParams
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import MEASURED
from tests.engines.rollout.sglang.test_partial_rollout import Dies, ServedFleet
from tests.requests import by_id, group
from tests.sglang_server import START_TIMEOUT, sglang_config
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def deterministic(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    config = sglang_config(enable_deterministic_inference=True, attention_backend="triton", mem_fraction_static=0.3)
    config = config.model_copy(update={"dtype": "bfloat16"})  # SGLang's kernels for GPUs take no float32
    log = tmp_path_factory.mktemp("logs") / "server.log"
    engine = SGLangEngine(str(sglang_model), config, "cuda", log, START_TIMEOUT)
    yield engine
    engine.close()


def groups(numbers: Iterable[int]) -> list[GenerateRequest]:
    return [
        one
        for number in numbers
        for one in group(
            number,
            [5 + (number + place) % 40 for place in range(8 + number)],
            range(100 * number, 100 * number + 4),
            SamplingParams(32),
        )
    ]


def test_with_deterministic_inference_a_group_comes_out_the_same_in_other_company(deterministic: SGLangEngine) -> None:
    assert deterministic.check_batch_invariance()
    together = by_id(deterministic.generate(groups(range(6))))
    for missing in ([2], [4, 1], [5, 0, 3]):
        again = by_id(deterministic.generate(groups(missing)))
        assert len(again) == 4 * len(missing)
        for place, sample in again.items():
            np.testing.assert_array_equal(sample.response_ids, together[place].response_ids)
            np.testing.assert_array_equal(sample.log_probs, together[place].log_probs)
    assert len({tuple(sample.response_ids.tolist()) for sample in together.values()}) > 6


def rolled_out(folder: Path, config: RunConfig, engine: SGLangEngine, *, killed_after: int | None = None) -> pa.Table:
    """The samples of a run's first shard, of a driver that dies after some groups and the next one, or of one alone."""
    if killed_after is not None:
        fleet = ServedFleet(config, engine, dies_after=killed_after)
        with tiny_context(str(folder), config, fleet=fleet) as (run, _), pytest.raises(Dies):
            iteration(run, DirectSteps(run), 0)
    with tiny_context(str(folder), config, fleet=ServedFleet(config, engine)) as (run, _):
        iteration(run, DirectSteps(run), 0)
        (commit,) = (commit for commit in run.ledger.commits(0) if commit.step is Step.ROLLOUT)
        assert (commit.metrics["recovered_groups"] > 0) == (killed_after is not None)
        return run.read(commit).drop_columns(list(MEASURED))


def test_with_deterministic_inference_a_shard_that_is_generated_again_is_equal(
    deterministic: SGLangEngine, tiny_assets: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1, "rollout_batch_size": 6, "n_samples_per_prompt": 4})
    whole = rolled_out(tmp_path / "whole", config, deterministic)
    assert rolled_out(tmp_path / "killed", config, deterministic, killed_after=2).equals(whole)
