"""The longest begin first: where prompts come again, the order is that of what they took, and no sample is another."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import Completion, GenerateRequest
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.context import RunContext
from tests.local_fleet import LocalRollout
from tests.tasks.generation.test_partial_rollout import Generate, fleet_with
from tests.tiny_run import PROMPTS, DirectSteps, tiny_config, tiny_context, train_digests

ITERATIONS = 3
"""Of half an epoch each."""


def twice(assets: Path) -> RunConfig:
    rollout = {
        "num_rollout": ITERATIONS,
        "rollout_batch_size": len(PROMPTS) // 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 24,
        "rollout_stop_token_ids": tuple(range(3, 40)),  # so that responses end at different times
        "max_running_requests": 4,
    }
    return tiny_config(assets, rollout=rollout)


def lengths(run: RunContext, index: int) -> dict[int, float]:
    """Tokens by prompt, as the ledger has them."""
    found: dict[int, list[int]] = {}
    for row in run.read(run.committed(index, Step.ROLLOUT, "00-000")).to_pylist():
        found.setdefault(row["prompt_index"], []).append(len(row["response_ids"]))
    return {prompt: float(np.mean(tokens)) for prompt, tokens in found.items()}


def test_samples_begin_by_what_their_prompts_took_before_and_come_out_the_same(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = twice(tiny_assets)
    requested: list[list[int]] = []

    def noted(_: LocalRollout, generate: Generate) -> Generate:
        def generate_noted(requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
            requested.append(list(dict.fromkeys(request.request_id[0] for request in requests)))
            return generate(requests)

        return generate_noted

    one, other = tmp_path / "one", tmp_path / "other"
    with tiny_context(str(one), config, fleet=fleet_with(config, noted)) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        shutil.copytree(one, other)
        iteration(run, DirectSteps(run), 2)
        first = lengths(run, 0) | lengths(run, 1)
        for index in range(ITERATIONS):
            table = run.read(run.committed(index, Step.ROLLOUT, "00-000"))
            prompts = dict(zip(table["group_id"].to_pylist(), table["prompt_index"].to_pylist(), strict=True))
            took = [first[prompts[group]] for group in requested[index]]
            assert (requested[index] == sorted(requested[index])) == (index < 2), (
                "as they were drawn, while nothing is known"
            )
            assert index < 2 or took == sorted(took, reverse=True)
        digests = train_digests(run, range(ITERATIONS))
    with tiny_context(str(other), config, fleet=fleet_with(config, noted)) as (run, _):  # its driver knows nothing
        iteration(run, DirectSteps(run), 2)
        assert requested[-1] == sorted(requested[-1])
        assert train_digests(run, range(ITERATIONS)) == digests
