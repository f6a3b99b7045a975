"""A tiny model that knows a few dialogues by heart, so that its replies call tools and have thoughts."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.engines.agents.capture.session import Session
from cairn.engines.models.tokenizers import read_tokenizer
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types.types import SamplingParams
from examples.quickstart.model import build_model, build_tokenizer
from tests.engines.agents.episodes.looped import looped
from tests.engines.rollout.models import rollout_config

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call><|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index0 > last.user %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As those of models are: thoughts of earlier turns are left out, and a call is told with other spaces than this model
writes."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'
CALLED = {"name": "add", "arguments": {"a": 2, "b": 3}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@contextmanager
def as_agents(session: Session) -> Iterator[None]:
    """With the environment that the process of an agent has: clients know from it whom to ask."""
    with pytest.MonkeyPatch.context() as shell:
        for name, value in session.environment.items():
            shell.setenv(name, value)
        yield


_AFTER_CALL = [
    user("Add 2 and 3."),
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]},
    {"role": "tool", "content": "5"},
]
_THOUGHT = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."}
DIALOGUES: list[tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = [
    ([ADD], _AFTER_CALL[:1], CALL),
    ([ADD], _AFTER_CALL, "It is 5."),
    ([ADD], [*_AFTER_CALL, {"role": "assistant", "content": "It is 5."}, user("Sure?")], "Yes."),
    ([], [user("Think.")], "<think>\nHm.\n</think>\n\nDone."),
    ([], [user("Think."), _THOUGHT, user("Again.")], "<think>\nHm.\n</think>\n\nDone again."),
    ([], [user("Hello.")], "Hello to you."),
    ([], [user("Hello."), {"role": "assistant", "content": "Hello to you."}, user("Bye.")], "Bye now."),
]


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer = build_tokenizer([CALL, "<think>\nHm.\n</think>\n\nDone again.", "<|im_start|>assistant\n"])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = build_model(tokenizer, seed=0)
    pairs = []
    for tools, messages, reply in DIALOGUES:
        how: dict[str, Any] = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True}
        prompt = tokenizer.apply_chat_template(messages, **how)
        # What is sampled stays in the history as it was sampled.
        prompts = {prompt, prompt.replace(CALL_AS_TOLD, CALL)}
        ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in prompts]
        pairs += [(one, tokenizer(f"{reply}<|im_end|>", add_special_tokens=False)["input_ids"]) for one in ids]
    longest = max(len(prompt) + len(reply) for prompt, reply in pairs)
    inputs, labels = torch.zeros(len(pairs), longest, dtype=torch.long), torch.full((len(pairs), longest), -100)
    for row, (prompt, reply) in enumerate(pairs):
        inputs[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size the others only wait for each other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(100):
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 5e-3:
            break
    torch.set_num_threads(threads)
    assert loss.item() < 5e-3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CALL_AS_TOLD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")  # what it has recorded does not outlive a module
def engine(talker: Path) -> TransformersEngine:
    return TransformersEngine(str(talker), rollout_config())


@pytest.fixture(scope="session")
def tokenizer(talker: Path) -> Any:
    return read_tokenizer(talker)


Run = Callable[..., list[GeneratedSample]]


@pytest.fixture
def run(engine: TransformersEngine, tokenizer: Any) -> Run:
    """Runs a function for some samples, with a tokenizer."""

    def run(function: Any, samples: int = 1, **params: Any) -> list[GeneratedSample]:
        requested = [SampleRequest(0, index, [20, 21, 22], 1000 + index) for index in range(samples)]
        how = SamplingParams(**{"max_new_tokens": 60, "temperature": 0.0, **params})
        with closing(engine.open()) as stream:
            result = [sample for part in looped(stream, requested, how, function, lambda: tokenizer) for sample in part]
        return sorted(result, key=lambda sample: sample.key)

    return run
