"""A prompt that goes on from a sampled reply says what the chat template says, each end of a turn once."""

import json
from typing import Any

import numpy as np

from cairn.engines.agents.capture.protocol import ChatTemplate, Exchange, conversation
from cairn.engines.agents.generation.call_formats import TemplateFormat
from cairn.engines.types.trajectories import Segment
from cairn.engines.types.types import FinishReason
from tests.chat_templates import TEMPLATES, tokenizer_of
from tests.tables import cases

HI, SUM = {"role": "user", "content": "Hi"}, {"role": "user", "content": "2+2?"}
RESULT = {"role": "tool", "content": "4"}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
GLM_CALL = "\n<think></think>\n\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"


class Tool:
    schema = ADD


def sampled(ids: Any) -> Segment:
    count = len(ids)
    zeros = np.zeros(count, np.float32)
    return Segment(
        np.asarray(ids, np.int32), np.ones(count, np.uint8), "0", zeros, zeros.astype(np.int32), 1, FinishReason.STOP
    )


@cases(
    ("kind", "said", "end", "later"),
    [
        ("chatml", "Hello.", "<|im_end|>", SUM),
        ("closes nothing", "\n<think></think>\nHello.", "<|user|>", SUM),
        ("closes nothing", GLM_CALL.replace("\n\n<tool", "\n<tool"), "<|observation|>", RESULT),
        ("trims", "Hello.", "<end_of_turn>", SUM),
        ("closes twice", "Hello.", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", SUM),
    ],
)
def test_a_second_request_reads_what_the_template_writes(kind: str, said: str, end: str, later: dict[str, str]) -> None:
    tokenizer, _ = tokenizer_of(TEMPLATES[kind])
    template, tools = ChatTemplate(tokenizer, {}), [ADD] if later is RESULT else []
    ids, messages, _ = template.prompt([HI], tools, [])
    exchange = Exchange(ids, sampled(template.ids(said + end)), None)
    reply = template.reply(ids, said, tools, cut=False)
    known = conversation(messages, tools, reply, exchange)
    prompt, whole, _ = template.prompt([HI, known.reply, later], tools, [known])
    assert exchange.is_before(prompt)
    assert template.text(prompt) == tokenizer.apply_chat_template(
        list(whole), tools=tools or None, tokenize=False, add_generation_prompt=True
    )


@cases(
    ("kind", "said", "end"),
    [
        ("closes nothing", GLM_CALL.replace("\n\n<tool", "\n<tool"), "<|observation|>"),
        ("chatml", '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "<|im_end|>"),
        ("closes twice", "Hello.", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    ],
)
def test_results_of_tools_follow_a_reply_as_the_template_writes_them(kind: str, said: str, end: str) -> None:
    tokenizer, _ = tokenizer_of(TEMPLATES[kind])
    prompt = tokenizer.apply_chat_template([HI], tokenize=False, add_generation_prompt=True)
    form: Any = TemplateFormat(tokenizer, {"add": Tool}, prompt)  # type: ignore[dict-item]
    ids = np.asarray(tokenizer(said + end, add_special_tokens=False)["input_ids"])
    results = tokenizer.decode(form.results(ids, [("add", "4")]))
    written = tokenizer.apply_chat_template(
        [HI, {"role": "assistant", "content": "Hello."}, {"role": "tool", "name": "add", "content": "4"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert written.endswith(end + results)
    assert not results.startswith("<|END_RESPONSE|>")


@cases("result", ["4", 'a "line"\nand another'])
def test_results_follow_a_call_where_the_template_wants_a_call_before_them(result: str) -> None:
    tokenizer, _ = tokenizer_of(TEMPLATES["closes the last turn otherwise"])
    form: Any = TemplateFormat(tokenizer, {"add": Tool}, "<|start|>assistant")  # type: ignore[dict-item]
    said = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'
    ids = np.asarray(tokenizer(said, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(form.results(ids, [("add", result)])) == (
        f"<|start|>functions.add to=assistant<|channel|>commentary<|message|>{json.dumps(result)}<|end|>"
        "<|start|>assistant"
    )
