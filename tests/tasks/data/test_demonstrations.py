"""Of a demonstration exactly what the assistant says is learned, as the template writes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.schema.data import DataConfig
from cairn.tasks.data.demonstrations import DemonstrationData
from examples.quickstart.model import build_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # what Qwen3's does with thoughts: those before the last question are left out
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ parts[0].replace('<think>', '').strip() if parts|length > 1 }}\n"
    "</think>\n\n{% endif %}{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Sort."},
    {"role": "user", "content": "3 1"},
    {"role": "assistant", "content": "1 3"},
    {"role": "user", "content": "2 0"},
    {"role": "assistant", "content": "\n0 2"},
]


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(["Sort the digits 3 9 0 in increasing order.", "user\nassistant\nsystem\n"])


def opened(folder: Path, tokenizer: Any, *rows: dict[str, Any], max_length: int = 500, **options: Any):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    format = DataConfig.model_validate({"path": str(path), "input_key": "messages", **options})
    return DemonstrationData.open(format, str(path), tokenizer, max_length)


def learned(tokenizer: Any, data: DemonstrationData, index: int = 0) -> list[str]:
    """The text of every stretch of learned tokens."""
    (sample,) = data.row(index).samples
    found, previous = [], 0
    for id, one in zip(sample.response_ids, sample.loss_mask, strict=True):
        if one:
            found = [*found[:-1], [*found[-1], id]] if previous else [*found, [id]]
        previous = one
    return [tokenizer.decode(ids) for ids in found]


def test_every_turn_is_learned_through_the_token_that_ends_it(tmp_path, tokenizer):
    data = opened(tmp_path, tokenizer, {"messages": CHAT})
    assert learned(tokenizer, data) == ["1 3<|im_end|>", "\n0 2<|im_end|>"]
    (sample,) = data.row(0).samples
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    ids = tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([*sample.prompt_ids, *sample.response_ids]) == whole.removesuffix("\n")
    assert len(ids) <= len(sample)  # the answer's line break is a token of its own, as it is where it is sampled


def test_a_template_that_marks_its_turns_is_believed(tmp_path, tokenizer):
    located = opened(tmp_path, tokenizer, {"messages": CHAT[:3]}).row(0)
    tokenizer.chat_template = CHATML
    assert opened(tmp_path, tokenizer, {"messages": CHAT[:3]}).row(0) == located
    chat = [*CHAT[:2], {**CHAT[2], "step_loss_mask": 0}, *CHAT[3:]]
    assert learned(tokenizer, opened(tmp_path, tokenizer, {"messages": chat})) == ["\n0 2<|im_end|>"]


@pytest.mark.parametrize("option", ["last_turn_only", "step_loss_mask"])
def test_turns_can_be_left_out(tmp_path, tokenizer, option):
    first = CHAT[2] | ({"step_loss_mask": 0} if option == "step_loss_mask" else {})
    data = opened(
        tmp_path, tokenizer, {"messages": [*CHAT[:2], first, *CHAT[3:]]}, last_turn_only=option == "last_turn_only"
    )
    assert learned(tokenizer, data) == ["\n0 2<|im_end|>"]


def test_what_the_template_drops_is_not_learned(tmp_path, tokenizer):
    tokenizer.chat_template = THINKING
    turns = [
        {**turn, "content": f"<think>hm</think>{turn['content']}"} if n in (2, 4) else turn
        for n, turn in enumerate(CHAT)
    ]
    assert learned(tokenizer, opened(tmp_path, tokenizer, {"messages": turns})) == [
        "1 3<|im_end|>",
        "<think>\nhm\n</think>\n\n0 2<|im_end|>",
    ]


def test_a_response_follows_its_prompt(tmp_path, tokenizer):
    rows = [{"messages": "3 1", "answer": "1 3"}, {"messages": CHAT[:4], "answer": [CHAT[4]]}]
    data = opened(tmp_path, tokenizer, *rows, response_key="answer")
    assert learned(tokenizer, data) == ["1 3<|im_end|>"]
    assert learned(tokenizer, data, 1) == ["\n0 2<|im_end|>"]  # and not the turn of the prompt
    plain = opened(tmp_path, tokenizer, rows[0], response_key="answer", apply_chat_template=False).row(0).samples[0]
    assert tokenizer.decode(plain.prompt_ids) == "3 1"
    assert tokenizer.decode(plain.response_ids) == "1 3<|im_end|>"


def test_a_response_without_a_template_ends_where_the_model_stops(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": "3 1", "answer": "1 3"}\n')
    format = DataConfig.model_validate(
        {"path": str(path), "input_key": "messages", "response_key": "answer", "apply_chat_template": False}
    )
    ends = {tokenizer.pad_token_id}
    row = DemonstrationData.open(format, str(path), tokenizer, 500, model_ends=ends).row(0)
    assert tokenizer.decode(row.samples[0].response_ids) == "1 3<|endoftext|>"
    tokenizer.eos_token = None
    with pytest.raises(BadData, match=r"names an end token, so .*: add eos_token_id to its generation_config\.json"):
        DemonstrationData.open(format, str(path), tokenizer, 500)


def test_the_template_is_given_the_tools(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ tools[0].name if tools }}" + tokenizer.chat_template
    row = opened(tmp_path, tokenizer, {"messages": CHAT, "tools": [{"name": "calculator"}]}, tool_key="tools").row(0)
    assert tokenizer.decode(row.prompt_ids).startswith("calculator<|im_start|>")


@pytest.mark.parametrize(
    ("overlong", "length", "error"),
    [
        ("pass_over", 20, BadPrompt),
        ("refuse", 20, BadData),
        ("truncate", 40, None),
        ("truncate", 5, BadPrompt),  # nothing is left to learn
    ],
)
def test_a_row_that_is_too_long_meets_the_policy(tmp_path, tokenizer, overlong, length, error):
    whole = opened(tmp_path, tokenizer, {"messages": CHAT}).row(0).samples[0]
    data = opened(tmp_path, tokenizer, {"messages": CHAT}, max_length=length, overlong=overlong)
    if error is not None:
        with pytest.raises(error, match="row 1") as raised:
            data.row(0)
        assert type(raised.value) is error
        return
    row = data.row(0)
    (cut,) = row.samples
    assert row.truncated
    assert (whole.prompt_ids + whole.response_ids)[: len(cut)] == cut.prompt_ids + cut.response_ids
    assert len(cut) <= length


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"messages": "text"}, {}, "'messages' is a string and data.response_key is null"),
        ({"messages": "a", "answer": 3}, {"response_key": "answer"}, "name another field in response_key"),
        ({"messages": "a"}, {"response_key": "answer"}, "answer"),
        ({"messages": "a"}, {"apply_chat_template": False}, "data.response_key is null and"),
    ],
)
def test_rows_that_hold_no_demonstration_are_refused_when_they_are_opened(tmp_path, tokenizer, row, options, message):
    with pytest.raises(BadData, match=message):
        opened(tmp_path, tokenizer, row, **options)


@pytest.mark.parametrize("chat", [CHAT[:2], [{"role": "user", "content": "\ud800"}, CHAT[2]]])
def test_a_row_without_anything_to_learn_is_passed_over(tmp_path, tokenizer, chat):
    with pytest.raises(BadPrompt, match="row 1"):
        opened(tmp_path, tokenizer, {"messages": chat}).row(0)


def pairs(folder: Path, tokenizer: Any, row: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    path = folder / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    format = DataConfig.model_validate({"path": str(path), **options})
    found = DemonstrationData.open(format, str(path), tokenizer, 500, pairs=True).row(0).samples
    return [(tokenizer.decode(one.prompt_ids), tokenizer.decode(one.response_ids)) for one in found]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3 1", "chosen": "1 3", "rejected": "3 1"},
        {"prompt": CHAT[1:2], "chosen": [CHAT[2]], "rejected": [{"role": "assistant", "content": "3 1"}]},
        {"chosen": CHAT[1:3], "rejected": [CHAT[1], {"role": "assistant", "content": "3 1"}]},
        {"prompt": "3 1", "chosen": CHAT[1:3], "rejected": [CHAT[1], {"role": "assistant", "content": "3 1"}]},
    ],
)
def test_a_pair_is_two_responses_to_one_prompt_however_it_is_written(tmp_path, tokenizer, row):
    prompt = "<|im_start|>user\n3 1<|im_end|>\n<|im_start|>assistant\n"
    assert pairs(tmp_path, tokenizer, row) == [(prompt, "1 3<|im_end|>"), (prompt, "3 1<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "1 3", "rejected": "3 1"}, "have no prompt"),
        ({"chosen": CHAT[:3], "rejected": CHAT[:2]}, "is the beginning of the other"),
        ({"prompt": "a", "chosen": "1 3"}, "rejected"),
    ],
)
def test_what_is_no_pair_is_refused_when_it_is_opened(tmp_path, tokenizer, row, message):
    with pytest.raises(BadData, match=message):
        pairs(tmp_path, tokenizer, row)
