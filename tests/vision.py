"""A tiny model of images and text, and what it is asked."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL.Image import fromarray

from cairn.engines.models.vision import image_processor, places_of, resized
from cairn.engines.types.images import Image, size_of
from cairn.engines.types.types import GenerateRequest, SamplingParams
from examples.dots.build import begin

SIZES = ((16, 16), (30, 50), (41, 17))
"""(height, width) of pictures, in pixels: of other sizes than a model sees them in."""


def dots(folder: Path, train: int = 8, held_out: int = 4) -> Path:
    """The example's data and untrained model."""
    begin(folder, seed=0, shown=64, train=train, held_out=held_out)
    return folder


def noise(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """A picture, encoded."""
    data = io.BytesIO()
    fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(data, kind)
    return data.getvalue()


def seen(folder: Path, data: bytes) -> Image:
    """An image in the size in which a model sees it."""
    return Image(data, *resized(image_processor(str(folder)), *size_of(data), None, None))


def prompt(folder: Path, images: Sequence[Image], text: Sequence[int] = (40, 41, 42)) -> list[int]:
    """Token ids: some text, each image between its marks, and text."""
    start, end, place = marks(str(folder))
    ids = [*text]
    for image in images:
        ids += [start, *[place] * places_of(image_processor(str(folder)), image), end]
    return [*ids, *text[::-1]]


@cache
def marks(folder: str) -> tuple[int, int, int]:
    """Ids of the tokens before an image, after it, and in its places."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end, place = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    return start, end, place


def asked(folder: Path, samples: int = 3, max_new_tokens: int = 9) -> list[GenerateRequest]:
    """Groups without an image, with one and with two, among them an equal prompt with another image."""
    one, two, three = (seen(folder, noise(*size, seed=number)) for number, size in enumerate(SIZES))
    other = seen(folder, noise(*SIZES[0], seed=9))
    groups: list[tuple[Image, ...]] = [(), (one,), (other,), (two, three), (three,)]
    return [
        GenerateRequest(
            (number, index), ids, 100 * number + index, SamplingParams(max_new_tokens=max_new_tokens), images=images
        )
        for number, images in enumerate(groups)
        for ids in [prompt(folder, images)]
        for index in range(samples)
    ]
