"""Inputs of a model of images and text besides token ids: image patches, their placeholders, and positions.

A prompt holds one placeholder token for each place that an image takes. The model puts the output of its vision tower
at these places. Each token has three position numbers: time, height and width (M-RoPE, Wang et al. 2024, "Qwen2-VL",
section 2.1). Those of text are equal, those of an image's places count its rows and columns, and text after an image
continues after the largest of them. The library computes them (`get_rope_index`).

The library's processor classes need torchvision for videos. So this module uses the PIL image processor of the model's
folder, and `cairn.tasks.data.prompts` writes the placeholders into prompts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from cairn.engines.types.errors import BadModel
from cairn.engines.types.images import BadImage, Image, decode

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names that folders use for this processor."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_CACHED_IMAGES = 256
"""Images whose patches are cached: all samples of a group share their images."""


@dataclass(frozen=True)
class ImageInputs:
    """Image inputs of a right-padded batch of B sequences of at most L tokens, with n images of p patches in total."""

    pixel_values: torch.Tensor
    """[p, values of a patch] float32, image after image."""
    image_grid_thw: torch.Tensor
    """[n, 3] int64: frames, rows and columns of patches of each image."""
    placeholders: torch.Tensor
    """[B, L] bool: the places that images take."""
    position_ids: torch.Tensor
    """[3, B, L] int64; 0 in padding."""
    next_positions: torch.Tensor
    """[B] int64: position of the token that would follow each sequence."""

    @contextmanager
    def applied_to(self, model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the arguments of a forward pass that must run within.

        Images go to `placeholders`. The library by itself would look for every token with the placeholder's id, and a
        response may contain such a token that was sampled.
        """
        core: Any = model.base_model
        core.get_placeholder_mask = lambda *args, **kwargs: (self.placeholders.unsqueeze(-1), None)
        try:
            yield {
                "pixel_values": self.pixel_values,
                "image_grid_thw": self.image_grid_thw,
                "position_ids": self.position_ids,
            }
        finally:
            del core.get_placeholder_mask


@lru_cache(maxsize=8)
def image_processor(folder: str) -> Qwen2VLImageProcessorPil:
    """Return the image processor of a model folder. Raises BadModel where it has none, or one of another kind."""
    if not any((Path(folder) / name).is_file() for name in _FILES):
        raise BadModel(
            f"Model folder {folder} has no {_FILES[0]}, which sets how it reads images: copy the model's own."
        )
    try:
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        kind = Qwen2VLImageProcessorPil.get_image_processor_dict(folder, local_files_only=True)[0]
    # The library may raise any exception for a broken file.
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise BadModel(f"The image processor of {folder} cannot be loaded ({why}): copy the model's own.") from error
    name = kind.get("image_processor_type", _PROCESSORS[0])
    if name not in _PROCESSORS:
        raise BadModel(f"Model folder {folder} has the image processor {name}; only {_PROCESSORS[0]} is supported.")
    return processor


def resized(
    processor: Qwen2VLImageProcessorPil, height: int, width: int, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """Return the (height, width) to which a picture is resized for the model.

    Both are multiples of the side of a place, and their product is within `min_pixels` and `max_pixels`, by default the
    processor's own. Raises ValueError where the picture is too narrow.
    """
    size: Any = processor.size
    return smart_resize(
        height,
        width,
        factor=processor.patch_size * processor.merge_size,
        min_pixels=min_pixels or size.shortest_edge,
        max_pixels=max_pixels or size.longest_edge,
    )


def trial_image(model: PreTrainedModel, rows: int, columns: int, seed: int) -> Image:
    """Return an image of noise that takes this many rows and columns of places."""
    from io import BytesIO

    from PIL.Image import fromarray

    processor = image_processor(_folder(model))
    side = processor.patch_size * processor.merge_size
    shape = rows * side, columns * side, 3
    data = BytesIO()
    fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(data, "PNG")
    return Image(data.getvalue(), *shape[:2])


def places_of(processor: Qwen2VLImageProcessorPil, image: Image) -> int:
    """Return the number of placeholders that an image takes."""
    side = processor.patch_size * processor.merge_size
    return (image.height // side) * (image.width // side)


def image_problem(model: PreTrainedModel, ids: np.ndarray, images: Sequence[Image]) -> str | None:
    """Return why a model could not generate after token ids with these images, as the end of a sentence; None if it
    can."""
    processor = image_processor(_folder(model))
    side = processor.patch_size * processor.merge_size
    for number, image in enumerate(images, 1):
        if image.height % side or image.width % side or not image.height * image.width:
            return f"its image {number} has {image.width} × {image.height} pixels, not multiples of {side}"
        try:
            _patches(_folder(model), image)
        except BadImage as error:
            return f"its image {number} {error}"
    try:
        places = _places(ids, model.config.image_token_id, [places_of(processor, image) for image in images])
    except ValueError as error:
        return str(error)
    return "its last token is an image placeholder: add text after it" if places[-1] == len(ids) - 1 else None


def image_inputs(
    model: PreTrainedModel,
    sequences: Sequence[np.ndarray],
    images: Sequence[Sequence[Image]],
    width: int | None = None,
) -> ImageInputs | None:
    """Return the image inputs of some sequences, on the model's device; None where no sequence has an image.

    The first placeholders of a sequence belong to its images. A later token with the same id was sampled.

    Args:
        width: length in tokens to which the sequences are padded, by default that of the longest.

    Raises:
        ValueError: the placeholders of a sequence do not match its images.
    """
    if not any(images):
        return None
    processor = image_processor(_folder(model))
    core: Any = model.base_model
    width = max(map(len, sequences)) if width is None else width
    patches, grids = [], []
    placeholders = torch.zeros(len(sequences), width, dtype=torch.bool)
    position_ids = torch.zeros(3, len(sequences), width, dtype=torch.int64)
    following = torch.zeros(len(sequences), dtype=torch.int64)
    for row, (ids, own) in enumerate(zip(sequences, images, strict=True)):
        read = [_patches(_folder(model), image) for image in own]
        patches += [part for part, _ in read]
        own_grids = torch.tensor([grid for _, grid in read], dtype=torch.int64).view(-1, 3)
        grids.append(own_grids)
        places = _places(ids, model.config.image_token_id, [places_of(processor, image) for image in own])
        placeholders[row, places] = True
        positions, shift = core.get_rope_index(
            torch.from_numpy(np.asarray(ids, np.int64))[None], placeholders[row : row + 1, : len(ids)].int(), own_grids
        )
        position_ids[:, row, : len(ids)] = positions[:, 0]
        following[row] = len(ids) + shift.item()
    return ImageInputs(
        torch.from_numpy(np.concatenate(patches)).to(model.device),
        torch.cat(grids).to(model.device),
        placeholders.to(model.device),
        position_ids.to(model.device),
        following.to(model.device),
    )


@contextmanager
def seeing(
    model: PreTrainedModel, sequences: Sequence[np.ndarray], images: Sequence[Sequence[Image]]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a forward pass over sequences with images, besides their ids; the pass must run within.

    Where no sequence has an image, the pass still runs through the vision tower, with an image that takes no place:
    ranks that share the model all take part, and the tower's weights get a gradient of 0.

    Raises:
        ValueError: as `image_inputs`.
    """
    with (image_inputs(model, sequences, images) or _nothing_seen(model, sequences)).applied_to(model) as arguments:
        yield arguments


def _folder(model: PreTrainedModel) -> str:
    """Return the folder from which the model was loaded."""
    return str(model.name_or_path)


def _places(ids: np.ndarray, token: int, counts: Sequence[int]) -> np.ndarray:
    """Return the indices of the images' placeholders.

    Each image must have as many consecutive placeholders as it takes places, with another token between two images,
    which the library would otherwise treat as one. Raises ValueError where that is not so.
    """
    places = np.flatnonzero(ids == token)[: sum(counts)]
    if len(places) < sum(counts):
        raise ValueError(f"it has {len(places)} placeholders, but its images need {sum(counts)}")
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    if breaks.tolist() != np.cumsum(counts)[:-1].tolist():
        raise ValueError("the placeholders of an image have to be consecutive, with a token between two images")
    return places


def _nothing_seen(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> ImageInputs:
    processor = image_processor(_folder(model))
    side = processor.merge_size
    values = 3 * processor.temporal_patch_size * processor.patch_size**2
    rows, width = len(sequences), max(map(len, sequences))
    return ImageInputs(
        torch.zeros(side * side, values, device=model.device),
        torch.tensor([[1, side, side]], device=model.device),
        torch.zeros(rows, width, dtype=torch.bool, device=model.device),
        torch.arange(width, device=model.device).expand(3, rows, width),
        torch.tensor([len(ids) for ids in sequences], device=model.device),
    )


@lru_cache(maxsize=_CACHED_IMAGES)
def _patches(folder: str, image: Image) -> tuple[np.ndarray, list[int]]:
    """Return the patches [p, values] float32 of an image, and its grid (1, rows, columns)."""
    processor = image_processor(folder)
    pixels = processor.process_image(decode(image.data), do_convert_rgb=processor.do_convert_rgb)
    # The processor's own `resize` chooses the size.
    size = SizeDict(height=image.height, width=image.width)
    pixels = PilBackend.resize(processor, pixels, size, resample=processor.resample)
    features = processor.preprocess(
        [pixels], do_resize=False, do_convert_rgb=False, input_data_format="channels_first", return_tensors="np"
    )
    return features["pixel_values"].astype(np.float32, copy=False), features["image_grid_thw"][0].tolist()
