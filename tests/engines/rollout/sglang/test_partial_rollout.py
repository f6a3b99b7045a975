"""Partial rollout through a real SGLang server: long responses are aborted, committed, and continued by later steps."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.types.types import Completion, GenerateRequest
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.selection import last_selection, unfinished_groups
from cairn.tasks.trainer.recovery import restore_trainer
from tests.local_fleet import LocalFleet, LocalRollout, calls
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

BATCH, SAMPLES, LENGTH = 2, 3, 400


class Served(LocalRollout):
    """The session's server as an engine of a fleet."""

    def __init__(self, engine: SGLangEngine, dies_after: int | None = None) -> None:
        self.name = "rollout:0"
        self.engine = engine  # type: ignore[assignment]
        self.batch_invariant = False
        self.serving = threading.Lock()
        self._samples = SampleEngine(calls(self.generate), engine.abort)
        self._dies_after = dies_after

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        left = Counter(request.request_id[0] for request in requests)
        done = 0
        for completions in self.engine.generate(requests):
            yield completions
            for completion in completions:
                left[completion.request_id[0]] -= 1
                done += left[completion.request_id[0]] == 0
            if self._dies_after is not None and done >= self._dies_after:
                raise Dies


class Dies(KeyboardInterrupt):
    """The driver's end."""


class ServedFleet(LocalFleet):
    """Trains in this process and rolls out through the server, which must first be told the initial weights."""

    def __init__(self, config: RunConfig, engine: SGLangEngine, dies_after: int | None = None) -> None:
        super().__init__(config)
        self.rollout = [Served(engine, dies_after)]  # type: ignore[list-item]
        engine.begin_weight_update(0)
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        engine.update_weights({name: value.detach() for name, value in model.named_parameters()})
        engine.end_weight_update()

    def model(self, config: RunConfig) -> PreTrainedModel:
        """As it is trained so far."""
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        for bucket in self.training.engine.export_weights(1 << 20):
            model.load_state_dict(bucket, strict=False)
        model.tie_weights()
        return model


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_long_responses_are_continued_over_iterations_and_a_kill(
    tiny_assets: Path, tmp_path: Path, engine: SGLangEngine
) -> None:
    config = tiny_config(
        tiny_assets,
        rollout={
            "num_rollout": 3,
            "rollout_batch_size": BATCH,
            "over_sampling_batch_size": 2 * BATCH + 2,
            "n_samples_per_prompt": SAMPLES,
            "rollout_max_response_len": LENGTH,
            "rollout_stop_token_ids": (3, 4),  # so that responses end at different times
            "partial_rollout": True,
            "max_age": 1,
        },
    )
    models = {}
    fleet = ServedFleet(config, engine)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        models[0] = fleet.model(config)
        iteration(run, DirectSteps(run), 0)
        models[1] = fleet.model(config)
        waiting = [group for _, _, group in unfinished_groups(run, last_selection(run, 0))]
        assert waiting
    killed = ServedFleet(config, engine, dies_after=1)
    with tiny_context(str(tmp_path), config, fleet=killed) as (run, _), pytest.raises(Dies):
        iteration(run, DirectSteps(run), 1)
    fleet = ServedFleet(config, engine)
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 1)
        models[2] = fleet.model(config)
        iteration(run, DirectSteps(run), 2)
        commits = [commit for index in range(3) for commit in run.ledger.commits(index)]
        rollouts = [commit for commit in commits if commit.step is Step.ROLLOUT]
        second = next(commit for commit in rollouts if commit.iteration == 1)
        assert second.metrics["continued_groups"] == len(waiting)
        assert second.metrics["recovered_groups"] >= 1
        earlier: dict[tuple[int, int], dict[str, Any]] = {}
        continued, worst = 0, 0.0
        for commit in rollouts:
            for row in run.read(commit).to_pylist():
                part = earlier.get((row["group_id"], row["sample_index"]))
                if part is not None:
                    retained = len(part["response_ids"])
                    assert row["response_ids"][:retained] == part["response_ids"]
                    assert row["log_probs"][:retained] == part["log_probs"]
                    continued += 0 < retained < len(row["response_ids"])
                versions = np.asarray(row["weight_versions"])
                for version in set(versions.tolist()):
                    expected = hf_log_probs(models[version], row)
                    difference = np.abs(np.asarray(row["log_probs"]) - expected)[versions == version]
                    worst = max(worst, float(difference.max()))
                earlier[row["group_id"], row["sample_index"]] = row
        assert continued > 0
        assert worst < 1e-4
        for index in range(3):
            estimated = run.committed(index, Step.ADVANTAGE)
            ages = np.concatenate([np.asarray(ages) for ages in run.read(estimated)["ages"].to_pylist()])
            assert estimated.metrics["age/masked_tokens"] == (ages > 1).sum()
        digests = train_digests(run, range(3))
    with tiny_context(str(tmp_path), config, fleet=ServedFleet(config, engine)) as (run, _):
        restore_trainer(run, run.committed(2, Step.TRAIN))  # raises where a digest differs
        assert train_digests(run, range(3)) == digests
        assert [finding for one in verify(run.ledger) for finding in one.findings] == []


def hf_log_probs(model: PreTrainedModel, row: dict[str, Any]) -> np.ndarray:
    """[T] of the whole response by Hugging Face."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
