"""What a model of images reads is what the library's own processor and positions make of them."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.vision import image_inputs, image_problem, image_processor, places_of
from cairn.engines.types.errors import BadModel
from cairn.engines.types.images import MAX_PIXELS, BadImage, Image, decode, size_of
from tests.vision import SIZES, dots, marks, noise, prompt, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dots(tmp_path_factory.mktemp("root") / "dots") / "untrained"


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return load_causal_lm(folder, torch.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_patches_are_those_of_the_librarys_processor(folder: Path, model, size: tuple[int, int], kind: str) -> None:
    data = noise(*size, kind=kind)
    processor = image_processor(str(folder))
    expected = processor(images=[Pictures.open(io.BytesIO(data))], return_tensors="np")
    image = seen(folder, data)
    result = image_inputs(model, [np.array(prompt(folder, [image]))], [[image]])
    assert result is not None
    assert result.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
    assert np.array_equal(result.pixel_values.numpy(), expected["pixel_values"])
    own = SimpleNamespace(image_processor=processor, image_token=".")
    assert Qwen2_5_VLProcessor.replace_image_token(own, expected, 0) == "." * places_of(processor, image)


def test_text_after_an_image_goes_on_after_the_largest_of_its_rows_and_columns(folder: Path, model) -> None:
    """Wang et al. 2024, section 2.1: an image of 2 rows and 3 columns at position p takes (p, p + row, p + column)."""
    image = Image(noise(16, 24), 16, 24)
    ids = np.array(prompt(folder, [image], text=(40, 41)))
    result = image_inputs(model, [ids], [[image]])
    assert result is not None
    assert result.position_ids[:, 0].tolist() == [
        [0, 1, 2, *[3] * 6, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]
    assert result.next_positions.tolist() == [9]


def test_a_placeholder_that_was_sampled_is_a_token_and_no_place(folder: Path, model) -> None:
    image = seen(folder, noise(16, 16))
    before = np.array(prompt(folder, [image]))
    result = image_inputs(model, [np.append(before, marks(str(folder))[2])], [[image]])
    assert result is not None
    assert not result.placeholders[0, -1]
    assert result.placeholders.sum() == 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_an_image_on_its_side_is_seen_upright(kind: str) -> None:
    picture = Pictures.new("RGB", (8, 4))
    picture.putpixel((0, 0), (255, 0, 0))
    exif = Pictures.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    data = io.BytesIO()
    picture.save(data, kind, exif=exif, lossless=True)
    assert size_of(data.getvalue()) == (8, 4)
    assert decode(data.getvalue()).getpixel((3, 0)) == (255, 0, 0)


def encoded(picture: Pictures.Image, kind: str) -> bytes:
    data = io.BytesIO()
    picture.save(data, kind)
    return data.getvalue()


BAD = {
    "no picture": (b"hello", "is not PNG, JPEG, WEBP, GIF, BMP or TIFF"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not PNG"),
    "a float": (encoded(Pictures.new("F", (4, 4)), "TIFF"), "mode F"),
    "sixteen bits": (encoded(Pictures.new("I;16", (4, 4)), "PNG"), "mode I;16"),
    "a bomb": (encoded(Pictures.new("1", (MAX_PIXELS // 1024, 1025)), "PNG"), f"more than {MAX_PIXELS}"),
}


@pytest.mark.parametrize("name", BAD)
def test_bytes_that_are_no_picture_are_refused_with_what_is_wrong(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(BadImage, match=message.replace("(", r"\(")):
        size_of(data)


def test_a_torn_picture_is_refused_when_it_is_decoded() -> None:
    torn = noise(40, 40)[:-200]
    assert size_of(torn) == (40, 40)
    with pytest.raises(BadImage, match="is broken"):
        decode(torn)


def test_prompts_whose_places_are_not_those_of_their_images_are_refused(folder: Path, model) -> None:
    image = seen(folder, noise(16, 16))
    start, end, place = marks(str(folder))
    cases = {
        (40, start, place, place, end, 41): "2 placeholders, but its images need 4",
        (40, start, place, place, end, place, place, 41): "have to be consecutive",
        (40, start, *[place] * 4): "add text after it",
    }
    for ids, message in cases.items():
        assert message in str(image_problem(model, np.array(ids), [image]))
    assert image_problem(model, np.array(prompt(folder, [image])), [image]) is None
    assert "not multiples of 8" in str(image_problem(model, np.array([1, 2]), [Image(noise(9, 9), 9, 9)]))


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no preprocessor_config"):
        image_processor(str(tmp_path))
