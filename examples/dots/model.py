"""The tiny model of images and text, untrained, with its tokenizer and image processor."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.quickstart.model import INITIAL_STD, build_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5-VL's, without its system message."""

PATCH = 4
"""Pixels of a patch's side; four patches make a place."""


def build_folder(folder: Path, corpus: Iterable[str], seed: int) -> None:
    """Write a Qwen2.5-VL of 295,000 parameters with random weights, float32, a tokenizer made for the corpus, and an
    image processor."""
    tokenizer = build_tokenizer(corpus)
    tokenizer.add_special_tokens({"additional_special_tokens": [VISION_START, VISION_END, IMAGE, VIDEO]})
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (VISION_START, VISION_END, IMAGE, VIDEO)}
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": 64,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "patch_size": PATCH,
                "window_size": 4 * PATCH,
                "fullatt_block_indexes": [1],
                "out_hidden_size": 64,
            },
            image_token_id=ids[IMAGE],
            video_token_id=ids[VIDEO],
            vision_start_token_id=ids[VISION_START],
            vision_end_token_id=ids[VISION_END],
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, INITIAL_STD)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=64, max_pixels=64 * 64).save_pretrained(folder)
