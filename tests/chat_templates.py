"""Chat templates of our own, one for each way in which published ones write and end an assistant's turn, and byte-level
tokenizers with them. `tests/tasks/data/test_trl_templates.py` holds them to the published ones."""

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_▁| .-]+?\|>|<｜[^｜]+｜>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|<bos>|<eos>|<end_of_utterance>"
    r"|<(?:START|END)[A-Z_]*>|<turn\|>|<\|turn>"
)
"""What tokenizers call special of what templates write."""

_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHTS = (
    "{% set parts = m.content.split('</think>') %}"
    "{% set thought = m.reasoning_content or parts[0].split('<think>')[-1] if m.reasoning_content or parts|length > 1 "
    "else '' %}{% set content = parts[-1].lstrip('\n') %}"
)
_OPENS_CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n"


@dataclass(frozen=True)
class Template:
    """A chat template, and the tokens that the models which have it name as their end."""

    source: str
    eos: str
    ends: tuple[str, ...] = ()
    """Of the generation config, beside `eos`."""
    like: str = ""
    """Name of the published one in TRL that writes chats so; empty where none does."""


TEMPLATES = {
    "chatml": Template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _OPENS_CHATML
        + "{% endif %}",
        "<|im_end|>",
        like="qwen3_instruct_2507",
    ),
    "chatml of a base model": Template(  # which names no end token that the template writes
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _OPENS_CHATML
        + "{% endif %}",
        "<|endoftext|>",
    ),
    "closes nothing": Template(
        "[gMASK]<sop>" + _LAST_QUESTION + "{% for m in messages %}{% if m.role == 'assistant' %}"
        "<|assistant|>\n<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>\n{{ m.content.strip() }}"
        "{% for call in m.tool_calls or () %}\n<tool_call>{{ call.function.name }}\n"
        "{% for key, value in call.function.arguments.items() %}"
        "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
        "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|endoftext|>",
        ("<|user|>", "<|observation|>"),
        like="glm4moe",
    ),
    "closes the whole chat": Template(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|endoftext|>",
        ("<|end|>", "<|assistant|>"),
        like="phi3",
    ),
    "trims": Template(
        "<s>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content.strip() }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<eos>",
        ("<end_of_turn>",),
        like="gemma3",
    ),
    "closes twice": Template(
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
        "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}<|{{ m.role.upper() }}_TOKEN|>{{ m.content }}"
        "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}",
        "<|END_OF_TURN_TOKEN|>",
        like="cohere2",
    ),
    "closes the last turn otherwise": Template(
        "{% for m in messages %}<|start|>{% if m.tool_calls %}assistant to=functions."
        "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments|tojson }}<|call|>"
        "{% elif m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call before a result') }}{% endif %}"
        "functions.{{ messages[loop.index0 - 1].tool_calls[0].function.name }} to=assistant<|channel|>commentary"
        "<|message|>{{ m.content|tojson }}<|end|>"
        "{% else %}{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>",
        ("<|endoftext|>", "<|call|>"),
        like="gptoss",
    ),
    "drops earlier thoughts": Template(
        _LAST_QUESTION
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + _THOUGHTS
        + "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
        "{{ content }}{% else %}{{ content }}{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}" + _OPENS_CHATML + "{% endif %}",
        "<|im_end|>",
        ("<|endoftext|>",),
        like="qwen3",
    ),
    "opens thoughts": Template(
        _LAST_QUESTION + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set m = dict(m, content=m.content.strip()) %}" + _THOUGHTS + "{% if loop.index0 > ns.last %}<think>\n"
        "{{ thought.strip() }}\n</think>\n\n{{ content }}{% else %}{{ content }}{% endif %}"
        "{% else %}{{ m.content.strip() }}{% endif %}<|im_end|>\n{% endfor %}" + _OPENS_CHATML + "<think>\n{% endif %}",
        "<|im_end|>",
        ("<|endoftext|>",),
        like="qwen3_5_think",
    ),
    "writes empty thoughts": Template(
        _LAST_QUESTION + "<|im_start|>system\n<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content and loop.index0 < ns.last %}<think></think>\n{{ m.content.strip() }}"
        "{% elif m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{{ m.content.strip() }}"
        "{% elif '<think>' in m.content %}{{ m.content.strip() }}"
        "{% else %}<think></think>{{ m.content.rstrip() }}{% endif %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _OPENS_CHATML + "<think>\n{% endif %}",
        "<|im_end|>",
        ("</s>",),
        like="nemotron_3_nano",
    ),
    "opens thoughts that it never writes": Template(
        "<s>{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
        "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        "<｜end▁of▁sentence｜>",
        like="deepseekv3",
    ),
    "words": Template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "<|endoftext|>",
    ),
}


def byte_tokenizer(template: str, eos: str | None, *, special: str = "") -> Any:
    """A tokenizer of bytes and of what `SPECIAL` finds in the template and in `special`; as in many a published one,
    only tokenizer.json calls these special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: id for id, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = sorted(set(SPECIAL.findall(template + special)) | ({eos} if eos else set()))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in found])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(template: Template) -> tuple[Any, frozenset[int]]:
    """The tokenizer of a model with a template, and the end tokens that the model's configs name."""
    tokenizer = byte_tokenizer(template.source, template.eos, special=" ".join(template.ends))
    return tokenizer, frozenset(tokenizer.convert_tokens_to_ids([template.eos, *template.ends]))
