"""Calls of tools by a policy that says what the test has it say: through the runner, with all that an episode has."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import cairn
from cairn.engines.agents.episodes.context import EpisodeOptions
from cairn.engines.agents.episodes.runner import Runner
from cairn.engines.agents.generation.call_formats import BadTemplate, TagFormat, TemplateFormat
from cairn.engines.agents.generation.tool_calls import MOST_CALLS, generate
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.trajectories import CallKind, CallRecord, GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, FinishReason, SamplingParams
from tests.engines.agents.generation.chat import TEMPLATE, chat_tokenizer

TOKENIZER = chat_tokenizer()


@cairn.tool(kind="pure")
async def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


@cairn.tool(kind="pure")
async def search(query: str) -> str:
    """Searches."""
    return f"found {query}"


@cairn.tool(kind="effects")
async def fails(x: int = 0) -> None:
    raise ValueError("not today")


@cairn.tool(kind="pure")
async def missing() -> None:
    raise cairn.ToolUnavailable("there is no sandbox here")


@cairn.tool(kind="pure")
async def long() -> str:
    return "x" * 5000


@dataclass
class Ended:
    sample: GeneratedSample
    calls: list[CallRecord] = field(default_factory=list)

    @property
    def texts(self) -> list[tuple[str, int]]:
        """The segments, each with whether it is trained on."""
        return [
            (TOKENIZER.decode(segment.ids, skip_special_tokens=False), int(segment.loss_mask.any()))
            for segment in self.sample.trajectory.segments
        ]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.texts)


def prompt_of(tools: dict[str, cairn.Tool], **arguments: Any) -> str:
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    schemas = [tool.schema for tool in tools.values()]
    text: str = TOKENIZER.apply_chat_template(
        messages, tools=schemas, tokenize=False, add_generation_prompt=True, **arguments
    )
    return text


def played(
    says: Sequence[str],
    *tools: cairn.Tool,
    prompt: str | None = None,
    length: int = 10**6,
    context: int = 10**6,
    **options: Any,
) -> Ended:
    """An episode whose policy says one text after the other; an answer is cut off after `length` tokens, and refused
    behind `context` of them."""
    named = {tool.name: tool for tool in tools}
    prompt = prompt_of(named) if prompt is None else prompt
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    left = iter(says)
    loop = asyncio.new_event_loop()
    params = SamplingParams(max_new_tokens=length)
    runner = Runner(loop, generate, params, lambda: TOKENIZER, lambda: named, EpisodeOptions(**options))
    calls: list[CallRecord] = []

    async def play() -> None:
        runner.begin([SampleRequest(0, 0, ids, 1, prompt=prompt)])
        while runner.left:
            await runner.changed()
            requests, runner.requests = runner.requests, []
            for request in requests:
                if len(request.input_ids) >= context:
                    refusal = RequestRefused({request.request_id: "the context is full"})
                    runner.answer(request.request_id, refusal)
                    continue
                said = TOKENIZER(next(left), add_special_tokens=False)["input_ids"]
                most = request.sampling_params.max_new_tokens
                reason = FinishReason.LENGTH if len(said) > most else FinishReason.STOP
                runner.answer(request.request_id, completion(request.request_id, said[:most], reason))
            if (recorded := runner.recorded()) is not None:
                calls.extend(recorded.records)
                if recorded.awaited:
                    runner.acknowledge(recorded.number)

    loop.run_until_complete(asyncio.wait_for(play(), 60))
    runner.close()
    (sample,) = runner.ended
    return Ended(sample, [record for record in calls if record.kind is CallKind.TOOL and record.order is not None])


def completion(id: Any, ids: list[int], reason: FinishReason) -> Completion:
    return Completion(
        request_id=id,
        response_ids=np.array(ids, np.int32),
        log_probs=np.zeros(len(ids), np.float32),
        weight_versions=np.zeros(len(ids), np.int32),
        finish_reason=reason,
        seconds=0.0,
    )


def hermes(*calls: tuple[str, Any]) -> str:
    parts = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    ]
    return "\n".join(parts) + "<|im_end|>"


ANSWER = "It is 42.<|im_end|>"


def test_an_episode_reads_as_the_template_writes_it():
    asks = hermes(("multiply", {"a": 6, "b": 7}), ("search", {"query": "42"}))
    ended = played(["I look. " + asks, ANSWER], multiply, search)
    assert ended.sample.error is None
    assert ended.sample.finish_reason == FinishReason.STOP
    messages = [
        {"role": "user", "content": "What is 6 times 7?"},
        {"role": "assistant", "content": ("I look. " + asks).removesuffix("<|im_end|>")},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "found 42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    schemas = [multiply.schema, search.schema]
    whole = TOKENIZER.apply_chat_template(messages, tools=schemas, tokenize=False)
    assert prompt_of({"multiply": multiply, "search": search}) + ended.text + "\n" == whole
    assert [trained for _, trained in ended.texts] == [1, 0, 1]
    assert [(call.name, call.result) for call in ended.calls] == [("multiply", "42"), ("search", '"found 42"')]


def test_what_was_sampled_is_not_tokenised_again():
    """The tokens of an answer are those that came, also where its text would be other tokens."""
    ended = played([hermes(("search", {"query": "é"})), ANSWER], search)
    first = ended.sample.trajectory.segments[0]
    assert first.call == "0"
    assert first.ids.tolist() == TOKENIZER(hermes(("search", {"query": "é"})), add_special_tokens=False)["input_ids"]


def test_the_next_answer_begins_as_the_data_had_the_first_one_begin():
    prompt = prompt_of({"search": search}, enable_thinking=False)
    ended = played([hermes(("search", {"query": "x"})), ANSWER], search, prompt=prompt)
    assert ended.texts[1][0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_an_answer_that_did_not_end_its_message_has_it_ended():
    """A stop string, for one, ends answers before their end token."""
    ended = played([hermes(("search", {"query": "x"})).removesuffix("<|im_end|>"), ANSWER], search)
    assert ended.texts[1][0].startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nfound x")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "error: what stands in <tool_call> is no JSON"),
        ("<tool_call>[1]</tool_call>", "error: a call is an object with a name and arguments"),
        (
            "<tool_call>" + "[" * 50_000 + "</tool_call>",
            "error: what stands in <tool_call> is no JSON",
        ),
        ('<tool_call>{"name": "nothing"}</tool_call>', "there is no tool 'nothing': use one of multiply, fails"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 1}}', "error: multiply: b is missing (it takes a, b)"),
        (
            '<tool_call>{"name": "multiply", "arguments": "x"}</tool_call>',
            "error: the arguments of multiply have to be a JSON object",
        ),
        ('<tool_call>{"name": "multiply", "arguments": null}</tool_call>', "error: the arguments of multiply have"),
        ('<tool_call>{"name": "fails"}</tool_call>', "error: fails: ValueError: not today"),
        (
            '<tool_call>{"name": "fails", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
            "error: the arguments of fails are nested more than 64 deep",
        ),
        (
            '<tool_call>{"name": "fails", "arguments": {"\\ud800": 1}}</tool_call>',
            "unable to parse raw data as a unicode string",
        ),
        ('<tool_call>{"name": "fails", "arguments": {"x": NaN}}</tool_call>', "error: fails: x: Input should be"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_recorded(call, told):
    ended = played([call + "<|im_end|>", ANSWER], multiply, fails)
    assert ended.sample.error is None
    assert told in ended.texts[1][0]
    (record,) = ended.calls
    assert record.error is not None
    assert record.name in ("unreadable_call", "multiply", "fails")


def test_what_the_machine_lacks_fails_the_sample_and_is_told_to_nobody():
    ended = played([hermes(("missing", {})), ANSWER], missing)
    assert ended.sample.error is not None
    assert "there is no sandbox here" in ended.sample.error
    assert not ended.calls


def test_a_model_that_never_stops_calling_is_cut_off_and_counts_as_truncated():
    ended = played([hermes(("search", {"query": str(n)})) for n in range(99)], search, max_turns=4)
    assert ended.sample.finish_reason == FinishReason.LENGTH
    assert len(ended.calls) == 3
    assert [trained for _, trained in ended.texts] == [1, 0, 1, 0, 1, 0, 1]


def test_one_that_calls_a_thousand_tools_at_once_gets_a_few():
    ended = played([hermes(*[("multiply", {"a": n, "b": 1}) for n in range(1000)]), ANSWER], multiply)
    assert len(ended.calls) == MOST_CALLS
    assert ended.texts[1][0].count(f"not called: an answer may ask for {MOST_CALLS} calls at most") == 1000 - MOST_CALLS


def test_the_budget_of_the_context_ends_an_episode():
    prompt = prompt_of({"long": long})
    room = len(TOKENIZER(prompt)["input_ids"]) + 1000
    ended = played([hermes(("long", {})), ANSWER], long, max_context_len=room)
    assert ended.sample.finish_reason == FinishReason.LENGTH
    assert len(ended.texts) == 1
    ended = played(["y" * 5000], long, max_context_len=room)
    assert ended.sample.finish_reason == FinishReason.LENGTH
    assert len(ended.text) == 1000


def test_the_end_of_the_models_context_does_too():
    prompt = prompt_of({"long": long})
    ended = played([hermes(("long", {})), ANSWER], long, context=len(TOKENIZER(prompt)["input_ids"]) + 1000)
    assert ended.sample.error is None
    assert ended.sample.finish_reason == FinishReason.LENGTH
    assert len(ended.texts) == 1


def test_an_answer_that_is_cut_off_calls_nothing():
    ended = played([hermes(("search", {"query": "x"})) + ANSWER], search, length=60)
    assert ended.sample.finish_reason == FinishReason.LENGTH
    assert not ended.calls


def test_calls_within_thoughts_are_none():
    thought = f"<think>maybe {hermes(('search', {'query': 'no'})).removesuffix('<|im_end|>')}</think>"
    ended = played([thought + hermes(("search", {"query": "yes"})), thought + ANSWER], search)
    assert [call.arguments for call in ended.calls] == ['{"query":"yes"}']
    assert len(ended.texts) == 3
    assert played([thought.removesuffix("</think>") + ANSWER], search).calls == []


def test_calls_in_tags():
    both = '<search>my words</search> and <multiply>{"a": 2, "b": 3}</multiply>'
    ended = played([both, "<multiply>2 3</multiply>", "42"], search, multiply, prompt="?", tool_call_format="tags")
    assert ended.texts[1] == ("\n<result>\nfound my words\n</result>\n\n<result>\n6\n</result>\n", 0)
    assert "multiply takes a JSON object with a, b" in ended.texts[3][0]
    assert [call.name for call in ended.calls] == ["search", "multiply", "unreadable_call"]
    assert TagFormat(TOKENIZER, {}).calls(np.array([1, 2])) == []


def test_tools_with_a_state_are_called_in_order_and_each_episode_has_its_own():
    class Count:
        def __init__(self) -> None:
            self.seen: list[int] = []

        @cairn.tool(kind="deterministic")
        async def push(self, x: int) -> list[int]:
            await asyncio.sleep(0.01 / (1 + x))
            self.seen.append(x)
            return list(self.seen)

    def fresh() -> cairn.Tool:
        return cairn.Tool(Count().push.function, kind="deterministic", name="push", fresh=fresh)

    says = [hermes(("push", {"x": 0}), ("push", {"x": 1}), ("push", {"x": 2})), ANSWER]
    shared = fresh()
    for _ in range(2):
        assert [call.result for call in played(says, shared).calls] == ["[0]", "[0,1]", "[0,1,2]"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ raise_exception('no tools here') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content }}",
    ],
)
def test_a_template_without_tools_is_told(template):
    form = TemplateFormat(chat_tokenizer(template), {}, "")
    with pytest.raises(BadTemplate, match=r"set rollout\.tool_call_format=tags"):
        form.results(np.array([1]), [("search", "found")])
    assert TemplateFormat(chat_tokenizer(TEMPLATE), {}, "").results(np.array([1]), [("search", "found")])
