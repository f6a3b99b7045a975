"""What is learned of a chat is what TRL's training templates mark of it, for every published template that TRL knows.

The same tokenizer renders both: TRL's copy of a published template, in which `Chats` locates the turns, and TRL's
training template, which marks them. TRL marks more: what the generation prompt has, and space behind the end.
`make test-all` puts TRL's wheel, which has the templates, into build/trl.
"""

from pathlib import Path
from typing import Any

import pytest

from cairn.tasks.data.demonstrations import Chats
from tests.chat_templates import TEMPLATES, byte_tokenizer, tokenizer_of
from tests.tasks.data.test_chats import CHATS, LEARNED, learned

FOLDER = Path(__file__).resolve().parents[3] / "build" / "trl" / "trl" / "chat_templates"
ENDS = {  # of the models that have the templates, as their generation configs name them
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<eos>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "muse_glimmer": ("<|eot|>",),
    "nemotron": ("</s>", "<|im_end|>"),
    "phi3": ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
}
DROPS_EARLIER_THOUGHTS = ("qwen3.", "qwen3_5", "qwen3_6", "nemotron_3_5", "nemotron_3_ultra")
"""Published templates whose thoughts in earlier turns TRL puts back, so that only the last turn is as published."""
DROPS_THOUGHTS = ("deepseek_r1_distill",)
"""Those of every turn."""
CONTENT_IN_PARTS = ("idefics3", "smolvlm", "llava_next")
"""Templates that take no string as a content."""


INLINE_THOUGHTS = CHATS["inline"][1]["content"].partition("\n\n")[0]


def pairs() -> list[str]:
    """Names of the templates that TRL has twice."""
    names = sorted(file.name.removesuffix("_training.jinja") for file in FOLDER.glob("*_training.jinja"))
    return [name for name in names if not name.startswith(CONTENT_IN_PARTS)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="build/trl has no templates of TRL: make build/trl/.installed"),
]


def of_trl(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def tokenizers(name: str) -> tuple[Any, Any, set[int]]:
    """With the published template and with the training template, and the end tokens."""
    ends = next(ends for start, ends in ENDS.items() if name.startswith(start))
    special = " ".join([*ends, of_trl(name), of_trl(f"{name}_training")])
    published, training = (byte_tokenizer(of_trl(one), ends[0], special=special) for one in (name, f"{name}_training"))
    return published, training, set(published.convert_tokens_to_ids(list(ends)))


def test_every_template_of_trl_is_compared() -> None:
    assert len(pairs()) >= 25
    assert all(name.startswith(tuple(ENDS)) for name in pairs())


@pytest.mark.parametrize("chat", ["plain", "thinking", "inline", "spaced"])
@pytest.mark.parametrize("name", pairs())
def test_what_is_learned_is_what_the_training_template_marks(name: str, chat: str) -> None:
    published, training, ends = tokenizers(name)
    messages = CHATS[chat]
    prompt: str = training.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    found = (
        learned(Chats(published, {}, ends), published, messages),
        learned(Chats(training, {}, ends), training, messages),
    )
    assert len(found[0]) == len(found[1])
    for place, (mine, marked) in enumerate(zip(*found, strict=True)):
        if place < len(found[0]) - 1 and f"{name}.".startswith(DROPS_EARLIER_THOUGHTS):
            continue
        before, match, after = marked.partition(mine)
        assert match, f"learned {mine!r}, marked {marked!r}"
        if chat == "inline" and name in DROPS_THOUGHTS:
            before = before.removesuffix(INLINE_THOUGHTS)
        assert before in prompt, f"{before!r} is no part of the generation prompt"
        assert after.removesuffix(published.eos_token).strip() == "", f"{after!r} is no space behind the end"


@pytest.mark.parametrize("kind", [kind for kind, template in TEMPLATES.items() if template.like])
def test_templates_of_our_own_write_chats_as_the_published_ones(kind: str) -> None:
    template = TEMPLATES[kind]
    own, _ = tokenizer_of(template)
    trl, *_ = tokenizers(template.like)
    for chat in LEARNED[kind].keys() - {"calling"}:
        for with_prompt in (False, True):
            how = {"tokenize": False, "add_generation_prompt": with_prompt}
            mine, published = (one.apply_chat_template(CHATS[chat], **how) for one in (own, trl))
            assert published.endswith(mine), chat
