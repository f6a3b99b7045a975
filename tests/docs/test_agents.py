"""The examples of docs/agents.md, each a file outside the tree, in a run of the real thing."""

from pathlib import Path

import pytest

from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from tests.docs.examples import write_examples
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_examples("agents.md", tmp_path)


@pytest.mark.proof
def test_a_page_is_looked_at_between_two_turns(folder: Path, tiny_assets: Path) -> None:
    option = {"custom_generate_function_path": f"{folder / 'page.py'}:generate"}
    config = tiny_config(tiny_assets, rollout=option)
    assert setup_problems(config) == []
    with tiny_context(str(folder / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commit = run.committed(0, Step.ROLLOUT, "00-000")
        samples = run.read(commit).to_pylist()
        calls = run.calls(commit)
    assert calls is not None
    looked = [row for row in calls[0].to_pylist() if row["kind"] == "tool"]
    assert [(row["name"], row["result"], row["turn"]) for row in looked] == [("look", '"The answer is 7."', 1)] * len(
        samples
    )
    for sample in samples:
        first, world, second = sample["segments"]
        assert (first["call"], world["call"], second["call"]) == ("0", None, "1")
        assert sample["loss_mask"] == [1] * first["tokens"] + [0] * world["tokens"] + [1] * second["tokens"]


@pytest.mark.slow
def test_an_agent_of_its_own_process_is_trained_by_what_it_asks(folder: Path, tiny_assets: Path) -> None:
    option = {
        "custom_generate_function_path": f"{folder / 'calls_home.py'}:generate",
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
    }
    config = tiny_config(tiny_assets, rollout=option, data={"apply_chat_template": False})
    assert setup_problems(config) == []
    with tiny_context(str(folder / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commit = run.committed(0, Step.ROLLOUT, "00-000")
        samples = run.read(commit).to_pylist()
        prompts = [run.tokenizer.decode(sample["trajectory_prompts"][0]) for sample in samples]
        answers = [run.tokenizer.decode(sample["response_ids"]) for sample in samples]
    assert commit.metrics["retold_tokens"] == 0
    assert commit.metrics["sampled_tokens"] == sum(sum(sample["loss_mask"]) for sample in samples)
    for sample, prompt, response in zip(samples, prompts, answers, strict=True):
        assert sample["error"] is None
        assert [segment["call"] is None for segment in sample["segments"]] == [False, True, False]
        assert prompt.count("<|im_start|>user") == 1
        assert response.count("Are you sure?<|im_end|>") == 1
