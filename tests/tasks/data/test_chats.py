"""However a chat template writes an assistant's turn, what is said is learned, and where to stop."""

from typing import Any

import pytest

from cairn.configs.errors import BadData, BadPrompt
from cairn.tasks.data.demonstrations import Chats
from tests.chat_templates import TEMPLATES, byte_tokenizer, tokenizer_of
from tests.tables import cases

HI, SUM = {"role": "user", "content": "Hi"}, {"role": "user", "content": "2+2?"}
HELLO, FOUR = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "It is 4."}
PLAIN = [HI, HELLO, SUM, FOUR]
THINKING = [HI, HELLO | {"reasoning_content": "greet"}, SUM, FOUR | {"reasoning_content": "add"}]
INLINE = [SUM, FOUR | {"content": "<think>\nadd\n</think>\n\nIt is 4."}]
SPACED = [HI, HELLO | {"content": "  Hello.  \n"}, SUM, FOUR | {"content": "\n\nIt is 4.\n"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = [SUM, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, FOUR]

LEARNED: dict[str, dict[str, list[str]]] = {
    "chatml": {"plain": ["Hello.<|im_end|>", "It is 4.<|im_end|>"]},
    "chatml of a base model": {"plain": ["Hello.<|im_end|>", "It is 4.<|im_end|>"]},
    "closes nothing": {
        "plain": ["\n<think></think>\nHello.<|user|>", "\n<think></think>\nIt is 4.<|user|>"],
        "thinking": ["\n<think></think>\nHello.<|user|>", "\n<think>add</think>\nIt is 4.<|user|>"],
        "calling": [
            "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
            "<|observation|>",
            "\n<think></think>\nIt is 4.<|user|>",
        ],
    },
    "closes the whole chat": {"plain": ["Hello.<|end|>", "It is 4.<|end|>"]},
    "trims": {
        "plain": ["Hello.<end_of_turn>", "It is 4.<end_of_turn>"],
        "spaced": ["Hello.<end_of_turn>", "It is 4.<end_of_turn>"],
    },
    "closes twice": {
        "plain": ["Hello.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "It is 4.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"]
    },
    "closes the last turn otherwise": {
        "plain": ["<|channel|>final<|message|>Hello.<|end|>", "<|channel|>final<|message|>It is 4.<|return|>"],
        "calling": [
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
            "<|channel|>final<|message|>It is 4.<|return|>",
        ],
    },
    "drops earlier thoughts": {
        "plain": ["Hello.<|im_end|>", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
        "thinking": ["Hello.<|im_end|>", "<think>\nadd\n</think>\n\nIt is 4.<|im_end|>"],
    },
    "opens thoughts": {
        "plain": ["Hello.<|im_end|>", "\n</think>\n\nIt is 4.<|im_end|>"],
        "thinking": ["Hello.<|im_end|>", "add\n</think>\n\nIt is 4.<|im_end|>"],
        "inline": ["add\n</think>\n\nIt is 4.<|im_end|>"],
    },
    "writes empty thoughts": {
        "plain": ["</think>Hello.<|im_end|>", "</think>It is 4.<|im_end|>"],
        "thinking": ["</think>\nHello.<|im_end|>", "add\n</think>\nIt is 4.<|im_end|>"],
        "inline": ["add\n</think>\n\nIt is 4.<|im_end|>"],
    },
    "opens thoughts that it never writes": {
        "plain": ["Hello.<｜end▁of▁sentence｜>", "It is 4.<｜end▁of▁sentence｜>"],
        "inline": ["\n\nIt is 4.<｜end▁of▁sentence｜>"],
    },
    "words": {"plain": ["Hello.", "It is 4.<|endoftext|>"]},  # only the last turn can have what the text has not
}
CHATS = {"plain": PLAIN, "thinking": THINKING, "inline": INLINE, "spaced": SPACED, "calling": CALLING}
CASES = [(name, chat) for name, chats in LEARNED.items() for chat in chats]


def learned(chats: Chats, tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    """The text of every stretch of learned tokens of a chat whose assistant's turns are all learned."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    found = chats.demonstrated(messages, turns, None, "row 1")
    stretches: list[list[int]] = [[]]
    for id, one in zip(found.response_ids, found.loss_mask, strict=True):
        if one:
            stretches[-1].append(id)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids) for ids in stretches if ids]


@cases(("name", "chat"), CASES)
def test_turns_are_learned_through_the_token_that_ends_them(name: str, chat: str) -> None:
    tokenizer, ends = tokenizer_of(TEMPLATES[name])
    assert learned(Chats(tokenizer, {}, ends), tokenizer, CHATS[chat]) == LEARNED[name][chat]


@cases("name", TEMPLATES)
def test_the_last_turn_ends_with_a_token_that_stops_the_engine(name: str) -> None:
    """Or with the one that the template closes turns with, where the model names none of them."""
    tokenizer, ends = tokenizer_of(TEMPLATES[name])
    ids = Chats(tokenizer, {}, ends).demonstrated([SUM, FOUR], [1], None, "row 1").response_ids
    assert ids[-1] in ends or (name, tokenizer.decode(ids[-1:])) == ("chatml of a base model", "<|im_end|>")


def test_a_thought_that_begins_like_a_prompt_is_learned_whole() -> None:
    """`<b>` begins as `<think>` does, which the template writes before an answer."""
    tokenizer, ends = tokenizer_of(TEMPLATES["opens thoughts"])
    chat = [HI, HELLO | {"content": "<b>Hello.</b>"}, SUM, FOUR]
    assert learned(Chats(tokenizer, {}, ends), tokenizer, chat)[0] == "<b>Hello.</b><|im_end|>"


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}END{% endfor %}"
)


@cases("end", ["<|im_end|>\n", ""])
def test_marks_that_leave_out_the_end_are_completed(end: str) -> None:
    tokenizer = byte_tokenizer(MARKED.replace("END", end), "<|im_end|>")
    chats = Chats(tokenizer, {}, {tokenizer.eos_token_id})
    assert learned(chats, tokenizer, PLAIN) == [f"Hello.{end.strip()}", "It is 4.<|im_end|>"]


def test_a_chat_of_which_nothing_is_to_be_learned_says_so() -> None:
    marks_questions = MARKED.replace(
        "{% else %}{{ m.content }}", "{% else %}{% generation %}{{ m.content }}{% endgeneration %}"
    )
    tokenizer = byte_tokenizer(marks_questions.replace("END", "<|im_end|>"), "<|im_end|>")
    with pytest.raises(BadPrompt, match="row 1 has nothing to learn"):
        Chats(tokenizer, {}, {tokenizer.eos_token_id}).demonstrated(PLAIN, [], None, "row 1")


def test_a_template_that_takes_no_text_is_looked_at_row_by_row() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content[0]['text'] + 3 }}{% endfor %}", None)
    Chats(tokenizer, {})


def test_a_model_without_any_end_token_is_refused() -> None:
    with pytest.raises(BadData, match=r"end token.*: add eos_token_id to its generation_config\.json"):
        Chats(byte_tokenizer(TEMPLATES["words"].source, None), {})
    Chats(byte_tokenizer(TEMPLATES["chatml"].source, None), {})  # the template itself closes turns


COUNTED = "{% for m in messages %}{{ m.content|length }}{{ m.role }}: {{ m.content }}AFTER</s>{% endfor %}"
GENERATION_PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"


@cases("after", ["", "{{ m.content|length }}"])
def test_a_turn_that_cannot_be_told_from_what_stands_around_it_is_refused(after: str) -> None:
    """What stands before a turn, or on both sides of it, depends on the turn."""
    tokenizer = byte_tokenizer(COUNTED.replace("AFTER", after) + GENERATION_PROMPT, "</s>")
    with pytest.raises(BadPrompt, match="row 1: the chat template writes other text around message 2"):
        learned(Chats(tokenizer, {}, {tokenizer.eos_token_id}), tokenizer, PLAIN)
