"""What a model writes to call a tool is read as its chat template writes it, or the run is refused before it starts."""

from itertools import product
from typing import Any

from cairn.engines.agents.generation.call_formats import unreadable_calls
from tests.chat_templates import TEMPLATES, byte_tokenizer, tokenizer_of
from tests.engines.agents.generation.chat import chat_tokenizer
from tests.tables import cases

_MESSAGES = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}CALL"
    "{% endfor %}"
)
_REST = (
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>OPENS{% endif %}"
)


def template(call: str, opens: str = "") -> str:
    return (_MESSAGES + _REST).replace("CALL", call).replace("OPENS", opens)


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments|tojson }}"
CALLS = {
    "DeepSeek V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments + '' }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # takes no mapping
    "DeepSeek V3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "Llama 3.2": "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}" + ARGUMENTS + "{{ '}' }}",
    "Mistral": "{{ raise_exception('nine letters') if c.id|length != 9 }}[TOOL_CALLS][{{ c.function|tojson }}]",
    "Hermes": "<tool_call>{{ c.function|tojson }}</tool_call>",
}


@cases(("model", "opens"), product(CALLS, ("", "<think>\n{# </think> #}")))
def test_calls_are_read_as_templates_write_them(model: str, opens: str) -> None:
    assert unreadable_calls(byte_tokenizer(template(CALLS[model], opens), "<|end|>")) is None


@cases("kind", ["closes nothing", "closes the last turn otherwise"])
def test_calls_of_templates_that_end_turns_in_their_own_way_are_read(kind: str) -> None:
    assert unreadable_calls(tokenizer_of(TEMPLATES[kind])[0]) is None


@cases(
    ("source", "why"),
    [
        (
            template("<|tool_call_start|>[{{ c.function.name }}(a=2)]<|tool_call_end|>"),
            "in an unsupported format ('<|tool",
        ),
        (TEMPLATES["chatml"].source, "the chat template renders no tool calls"),
        (TEMPLATES["words"].source, "the chat template renders no tool calls"),
        (template(CALLS["Hermes"]).replace("{{ m.content }}", ""), "cannot show the model tool results"),
    ],
)
def test_what_cannot_be_read_is_said(source: str, why: str) -> None:
    result = unreadable_calls(byte_tokenizer(source, "<|end|>"))
    assert result is not None
    assert why in result
    assert result.endswith(": set rollout.tool_call_format=tags, or use a model whose template supports tools")


def test_a_template_that_only_says_how_a_call_is_written_is_believed() -> None:
    tokenizer: Any = chat_tokenizer()
    assert unreadable_calls(tokenizer) is not None
    tokenizer.chat_template += "{# <tool_call> #}"
    assert unreadable_calls(tokenizer) is None
