"""A teacher behind a real SGLang server, by its own interface and by OpenAI's, against Hugging Face and against a
teacher in the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.scoring.client import ServedModel
from cairn.engines.training.top_k import row_shape
from cairn.engines.types.errors import TeacherUnusable
from cairn.engines.types.types import TrainBatch
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.batch.batch import arrays
from cairn.tasks.trainer import score as step
from examples.quickstart.model import build_model
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
SLOW = pytest.mark.slow


@pytest.fixture
def url(engine: SGLangEngine, sglang_model: Path) -> str:
    """Of the server, with the weights of the folder, whatever tests have given it before."""
    model = AutoModelForCausalLM.from_pretrained(sglang_model, dtype=torch.float32)
    engine.begin_weight_update((engine.get_weight_version() or 0) + 1)
    engine.update_weights({name: value.detach() for name, value in model.named_parameters()})
    engine.end_weight_update()
    result: str = engine.health()["url"]
    return result


def served(url: str, name: str, tokenizer: Any, api: str = "sglang", top_k: int = 0) -> ServedModel:
    def spell(token: int) -> str:
        return str(tokenizer.decode([token]))

    return ServedModel(url, api, name, timeout=60, concurrency=4, spell=spell, top_k=top_k)


@pytest.fixture
def completions(engine_with_tokenizer: SGLangEngine) -> str:
    """The address of a server with a tokenizer, without which OpenAI's interface does not work."""
    return str(engine_with_tokenizer.health()["url"])


@pytest.mark.parametrize(("api", "server"), [("sglang", "url"), pytest.param("openai", "completions", marks=SLOW)])
def test_log_probs_are_those_of_the_model_that_is_served(
    api: str, server: str, sglang_model: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(server)
    tokenizer = AutoTokenizer.from_pretrained(sglang_model)
    model = AutoModelForCausalLM.from_pretrained(sglang_model, dtype=torch.float32).eval()
    draw = np.random.default_rng(0)
    lengths = [5, 0, 1, 11, 7, 2]  # a response may be empty, and a prompt be one token
    ids = [
        draw.integers(5, len(tokenizer), n + prompt).astype(np.int32)
        for n, prompt in zip(lengths, [3, 2, 1, 4, 9, 1], strict=True)
    ]
    batch = TrainBatch(ids, lengths, [np.ones(n, np.uint8) for n in lengths])
    top_k = 3 if api == "sglang" else 0
    rows = served(f"{url}/v1", str(sglang_model), tokenizer, api, top_k).log_probs(batch)
    result = [row.reshape(-1, *row_shape(top_k)) if top_k else row for row in rows]
    for one, n, said in zip(ids, lengths, result, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(one[None].astype(np.int64))).logits[0].float()
        table = torch.log_softmax(logits[:-1], -1)
        expected = table.numpy()[np.arange(len(one) - 1), one[1:]]
        log_probs = said[:, 0] if top_k else said
        if top_k:
            top = table[len(table) - n :].topk(top_k)
            np.testing.assert_allclose(said[:, 1:], np.column_stack([top.values, top.indices]), atol=1e-4)
        assert (log_probs.dtype, len(log_probs)) == (np.float32, n)
        np.testing.assert_allclose(log_probs, expected[len(expected) - n :], atol=1e-4)


def test_a_model_that_the_server_does_not_have_is_named(url: str, sglang_model: Path) -> None:
    batch = TrainBatch([np.array([5, 6], np.int32)], [1], [np.ones(1, np.uint8)])
    with pytest.raises(TeacherUnusable, match=r"serves '.*' and not 'larger': set model.teacher_name"):
        served(url, "larger", None).log_probs(batch)


@pytest.mark.slow
def test_a_run_has_the_advantages_of_a_teacher_in_the_trainer_and_asks_once(
    url: str, tiny_assets: Path, sglang_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, student = AutoTokenizer.from_pretrained(sglang_model), tmp_path / "student"
    tokenizer.save_pretrained(student)
    build_model(tokenizer, seed=9).save_pretrained(student)
    teachers = [
        {"teacher_path": str(sglang_model)},
        {"teacher_url": url, "teacher_name": str(sglang_model)},
    ]
    result = []
    for index, teacher in enumerate(teachers):
        config = tiny_config(
            tiny_assets,
            model={"path": str(student), **teacher},
            algorithm={"use_opd": True, "opd_kl_coef": 0.5, "use_rollout_logprobs": True},
        )
        with tiny_context(str(tmp_path / f"store{index}"), config) as (run, _):
            iteration(run, DirectSteps(run), 0)
            scores, advantages = (run.read(run.committed(0, name)) for name in (Step.SCORE, Step.ADVANTAGE))
            result.append((arrays(scores, "teacher_log_probs"), arrays(advantages, "advantages")))
    for in_trainer, behind_a_server in zip(*result, strict=True):
        np.testing.assert_allclose(np.concatenate(behind_a_server), np.concatenate(in_trainer), atol=1e-4)
    assert np.ptp(np.concatenate(result[1][0])) > 0.1

    monkeypatch.setattr(step, "ServedModel", None)  # whoever asked now would fail
    with tiny_context(str(tmp_path / "store1"), config) as (run, events):
        iteration(run, DirectSteps(run), 0)
    assert "000000/score" in events.adopted()
