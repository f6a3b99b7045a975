"""Tokenizers, processors and images of models."""

import base64
import io
from collections.abc import Mapping
from functools import cache
from typing import Any


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a model, read once in a process. Its keyword arguments have no effect."""
    return _tokenizer(str(name_or_path))


@cache
def _tokenizer(name_or_path: str) -> Any:
    from cairn.engines.models.tokenizers import load_tokenizer as load

    return load(name_or_path)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return the processor of a model that sees images; None for other models."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        found = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, ProcessorMixin) else None


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a processor: tensors for images, audio and videos, lists for text."""
    given = dict(multimodal_inputs or {})
    text = {**given.get("text_kwargs", {}), "return_tensors": None, "return_mm_token_type_ids": False}
    media = {name: {**given.get(name, {}), "return_tensors": "pt"} for name in _MEDIA}
    return {**given, "text_kwargs": text, **media}


_MEDIA = ("audio_kwargs", "images_kwargs", "videos_kwargs")


def process_vision_info(messages: Any, processor: Any) -> dict[str, Any]:
    """Return the images of messages as PIL images, under `images`; None where there are none."""
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    images = [_image(part["image"]) for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    return {"images": images or None, "videos": None}


def _image(written: Any) -> Any:
    """Return an image given as such, as base64, as a data URL, or as the path of a file."""
    from PIL import Image

    if not isinstance(written, str):
        return written
    try:
        return Image.open(io.BytesIO(base64.b64decode(written.rpartition("base64,")[2], validate=True)))
    except (ValueError, OSError):
        return Image.open(written)


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a PIL image as a data URL of a PNG."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
