"""The quickstart's data and model are what the run needs, and are built once and whole."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.configs.schema.data import RowFormat
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.data.stream import draw
from cairn.tasks.rewards.exact_match import grade
from cairn.tasks.rewards.sample import Sample
from examples.quickstart import build as builder
from examples.quickstart.task import demonstration, is_held_out, problems
from examples.quickstart.warm_start import RUN, config
from tests.examples.conftest import warm_start
from tests.tiny_run import DirectSteps, tiny_context

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture
def built(root) -> Path:
    return root / builder.FOLDER


def rows(path: Path) -> Iterator[dict]:
    return map(json.loads, path.read_text().splitlines())


def test_no_prompt_is_both_trained_on_and_held_out(built):
    held_out = {row["prompt"] for row in rows(built / "heldout.jsonl")}
    trained = {row["prompt"] for name in ("train", "demonstrations") for row in rows(built / f"{name}.jsonl")}
    assert len(held_out) == builder.HELD_OUT_ROWS
    assert not held_out & trained


def test_labels_are_right_and_some_demonstrations_too(built):
    for row in rows(built / "train.jsonl"):
        digits = row["prompt"].removeprefix("Sort the digits ").removesuffix(" in increasing order.").split()
        assert row["label"] == " ".join(sorted(digits))
    graded = [
        grade(Sample(row["response"], " ".join(sorted(filter(str.isdigit, row["prompt"])))))
        for row in rows(built / "demonstrations.jsonl")
    ]
    assert sum(graded) / len(graded) == pytest.approx(1 - builder.WRONG_DEMONSTRATIONS, abs=0.05)


def test_a_wrong_demonstration_has_one_swap_of_neighbours():
    for _, digits in islice(problems(3, held_out=False), 200):
        answer = [int(c) for c in demonstration(digits, random.Random(1), 1.0) if c.isdigit()]
        differing = [i for i, (a, b) in enumerate(zip(answer, digits, strict=True)) if a != b]
        assert differing in ([], [differing[0], differing[0] + 1] if differing else [])
        assert bool(differing) == (len(set(digits)) > 1)


def test_the_hash_of_a_prompt_holds_out_an_eighth():
    share = sum(is_held_out(f"prompt {i}") for i in range(8000)) / 8000
    assert share == pytest.approx(1 / 8, abs=0.015)  # four standard deviations


def test_any_text_can_be_encoded_and_every_digit_is_a_token(built):
    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    text = bytes(range(256)).decode("latin-1") + " 日本 🙂\n\t\x00"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2025")) == ["2", "0", "2", "5"]


def test_the_model_is_a_small_qwen3_that_has_learned_the_form_of_an_answer(built):
    model = AutoModelForCausalLM.from_pretrained(built / "model")
    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    assert model.config.model_type == "qwen3"
    assert sum(p.numel() for p in model.parameters()) == 123_264
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    data = PromptData.open(RowFormat(), str(built / "heldout.jsonl"), tokenizer)
    prompt = model.dummy_inputs["input_ids"].new_tensor([data.row(0).prompt_ids])
    response = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(response) == "\\boxed{"


def test_a_second_build_does_nothing_and_another_seed_builds_again(built):
    before = (built / "model" / "model.safetensors").stat().st_mtime_ns
    assert not builder.build(built, steps=20)
    assert (built / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert builder._read_stamp(built) != builder._stamp(seed=1, steps=20)


@pytest.mark.proof
def test_a_build_whose_warm_start_is_lost_goes_on_with_it(tmp_path):
    folder = tmp_path / "quickstart"

    def dies(folder: Path, steps: int) -> None:
        with tiny_context(str(folder), config(folder, steps), RUN) as (run, _):
            iteration(run, DirectSteps(run), 0)
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        builder.build(folder, steps=20, train=dies)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert not (folder / "model").exists()
    begun = (folder / "untrained" / "model.safetensors").stat().st_mtime_ns
    assert builder.build(folder, steps=20, train=warm_start)
    assert (folder / "untrained" / "model.safetensors").stat().st_mtime_ns == begun
    ledger = Ledger.open(open_store(str(folder)), RUN)
    assert [commit.epoch for index in (0, 1) for commit in ledger.commits(index) if commit.step is Step.TRAIN] == [1, 2]
    assert not builder.build(folder, steps=20)


def test_of_a_pair_the_right_answer_is_preferred(built):
    for row in rows(built / "preferences.jsonl"):
        label = " ".join(sorted(filter(str.isdigit, row["prompt"])))
        assert [grade(Sample(row[name], label)) for name in ("chosen", "rejected")] == [1, 0]


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs {GSM8K}, the GSM8K training set")
def test_all_of_gsm8k_fits_into_the_context(built):
    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    format = RowFormat(input_key="question", label_key="answer", label_pattern=r"####\s*(.+)")
    data = PromptData.open(format, str(GSM8K), tokenizer)
    context = AutoModelForCausalLM.from_pretrained(built / "model").config.max_position_embeddings
    drawn = draw(data, 0, 7473, seed=0, shuffle=True, max_prompt_len=context - 1024)
    assert (len(drawn.rows), drawn.cursor, drawn.passed_over) == (7473, 7473, 0)
    assert all(row.label and row.label.replace(",", "").lstrip("-").isdigit() for row in drawn.rows)
