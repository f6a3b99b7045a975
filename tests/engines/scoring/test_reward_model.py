"""The reward model's engine against transformers itself."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cairn.configs.schema.reward import RewardModelConfig
from cairn.engines.scoring.reward_model import PromptAndResponse, RewardModel, load_reward_tokenizer
from cairn.engines.types.errors import BadModel
from tests.reward_models import write_reward_model
from tests.tomorrow import Tomorrow


@pytest.fixture(scope="module")
def folder(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "model", tiny_assets / "model")


def answered(prompt: str, response: str) -> PromptAndResponse:
    return PromptAndResponse(({"role": "user", "content": prompt},), prompt, response)


ANSWERED = [answered(f"Sort the digits {i}.", " ".join("0123456789"[: 1 + 2 * i])) for i in (3, 0, 4, 1, 2)]


def of_transformers(folder: Path, one: PromptAndResponse) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [*one.messages, {"role": "assistant", "content": one.response}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def test_a_score_is_what_transformers_says_of_the_chat(folder: Path) -> None:
    threads = torch.get_num_threads()
    engine = RewardModel(RewardModelConfig(path=str(folder)))
    scores = [one.value for one in engine.score(ANSWERED)]
    assert scores == pytest.approx([of_transformers(folder, one) for one in ANSWERED], abs=1e-6)
    assert len(set(scores)) == len(scores)
    assert torch.get_num_threads() == threads


def test_padding_and_company_change_no_score(folder: Path) -> None:
    alone = RewardModel(RewardModelConfig(path=str(folder))).score(ANSWERED)
    together = RewardModel(RewardModelConfig(path=str(folder), batch_size=4)).score(ANSWERED)
    assert [one.value for one in together] == pytest.approx([one.value for one in alone], abs=1e-5)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    repeated = RewardModel(RewardModelConfig(path=str(folder))).score(ANSWERED[::-1])
    assert [one.value for one in repeated] == [one.value for one in alone][::-1]


def test_without_a_chat_template_it_reads_the_text_and_the_response(folder: Path, tmp_path: Path) -> None:
    plain = write_reward_model(tmp_path / "plain", folder)
    (plain / "chat_template.jinja").unlink()
    assert not AutoTokenizer.from_pretrained(plain).chat_template
    one = ANSWERED[0]
    (score,) = RewardModel(RewardModelConfig(path=str(plain))).score([one])
    ids = AutoTokenizer.from_pretrained(plain)(one.text + one.response, return_tensors="pt")["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        assert score.value == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-6)


def test_a_score_does_not_depend_on_the_day(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = write_reward_model(tmp_path / "dated", folder)
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages[-1].content }}")
    options = RewardModelConfig(path=str(dated))
    (today,) = RewardModel(options).score([ANSWERED[0]])
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert RewardModel(options).score([ANSWERED[0]]) == [today]


def test_whatever_a_template_raises_is_the_samples(folder: Path, tmp_path: Path) -> None:
    broken = write_reward_model(tmp_path / "broken", folder)
    (broken / "chat_template.jinja").write_text("{{ 1 // (messages | length - 2) }}")
    (score,) = RewardModel(RewardModelConfig(path=str(broken))).score([ANSWERED[0]])
    assert score.value is None
    assert "the reward model's chat template refuses the chat: integer division" in str(score.error)


def test_what_is_longer_than_the_model_reads_has_no_score_and_says_so(folder: Path) -> None:
    (full,) = RewardModel(RewardModelConfig(path=str(folder))).score([ANSWERED[0]])
    options = RewardModelConfig(path=str(folder), max_length=full.tokens - 1)
    cut, short = RewardModel(options).score([ANSWERED[0], ANSWERED[1]])
    assert cut.value is None
    assert cut.error == (
        f"prompt and response are {full.tokens} tokens, and the reward model reads at most {full.tokens - 1}"
    )
    assert short.value is not None
    (fits,) = RewardModel(RewardModelConfig(path=str(folder), max_length=full.tokens)).score([ANSWERED[0]])
    assert fits.value == full.value


def test_a_score_that_is_not_finite_is_none(folder: Path, tmp_path: Path) -> None:
    write_reward_model(tmp_path, folder)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    (score,) = RewardModel(RewardModelConfig(path=str(tmp_path))).score([ANSWERED[0]])
    assert (score.value, score.error) == (None, "the reward model's score is nan")


def test_a_folder_that_is_no_reward_model_is_refused(folder: Path, tiny_assets: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="does not exist"):
        load_reward_tokenizer(tmp_path / "none")
    with pytest.raises(BadModel, match="ForCausalLM, which is not a reward model"):
        load_reward_tokenizer(tiny_assets / "model")
    with pytest.raises(BadModel, match="has 3 labels"):
        load_reward_tokenizer(write_reward_model(tmp_path / "three", folder, labels=3))
    bare = write_reward_model(tmp_path / "bare", folder)
    for file in bare.glob("*token*"):
        file.unlink()
    with pytest.raises(BadModel, match="no tokenizer"):
        load_reward_tokenizer(bare)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
