"""What a model of images and text reads beside token ids: patches of images, the places that they take, positions.

A prompt holds one placeholder token for each place that an image takes; the model puts what its vision tower makes of
the image there. Positions are three numbers a token, time, height and width (M-RoPE, Wang et al. 2024, "Qwen2-VL",
section 2.1): those of text are equal, those of an image's places count its rows and columns, and text after an image
goes on after the largest of them. The library computes them (`get_rope_index`).

The library's processor classes need torchvision for videos, so images go through the PIL image processor of the model's
folder here, and placeholders are laid by whoever makes the prompt (`cairn.tasks.data.prompts`).
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
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from cairn.engines.types.errors import BadModel
from cairn.engines.types.images import BadImage, Image, decode

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names under which folders have it."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_KEPT_IMAGES = 256
"""Images whose patches are kept: the samples of a group have theirs in common."""


@dataclass(frozen=True)
class ImageInputs:
    """Of a right-padded batch of B sequences of at most L tokens, with n images of p patches together."""

    pixel_values: torch.Tensor
    """[p, values of a patch] float32, image after image."""
    image_grid_thw: torch.Tensor
    """[n, 3] int64: pictures in time, rows and columns of patches of each image."""
    placeholders: torch.Tensor
    """[B, L] bool: the places that images take."""
    position_ids: torch.Tensor
    """[3, B, L] int64; 0 in padding."""
    next_positions: torch.Tensor
    """[B] int64: of the token that would follow each sequence."""

    @contextmanager
    def given(self, model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
        """Arguments of a forward pass that has to be made within: images go where `placeholders` says. The library by
        itself looks for every token of that id, and a response may hold one that was sampled."""
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


def image_processor(folder: str) -> Qwen2VLImageProcessorPil:
    """That of a model folder. Raises BadModel where it has none, or one of another kind."""
    return _image_processor(str(folder))


@lru_cache(maxsize=8)
def _image_processor(folder: str) -> Qwen2VLImageProcessorPil:
    if not any((Path(folder) / name).is_file() for name in _FILES):
        raise BadModel(f"Model folder {folder} has no {_FILES[0]}, for how it sees images: copy the model's own.")
    try:
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        kind = Qwen2VLImageProcessorPil.get_image_processor_dict(folder, local_files_only=True)[0]
    # The library reports a broken file with whatever it stumbles on.
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise BadModel(f"The image processor of {folder} cannot be loaded ({why}): copy the model's own.") from error
    name = kind.get("image_processor_type", _PROCESSORS[0])
    if name not in _PROCESSORS:
        raise BadModel(f"Model folder {folder} sees images by {name}; {_PROCESSORS[0]} is what can be used.")
    return processor


def resized(
    processor: Qwen2VLImageProcessorPil, height: int, width: int, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """(height, width) in which a model sees a picture: multiples of the side of a place, of at least `min_pixels` and
    at most `max_pixels` pixels, the processor's own by default. Raises ValueError where it is too narrow."""
    size: Any = processor.size
    return smart_resize(
        height,
        width,
        factor=processor.patch_size * processor.merge_size,
        min_pixels=min_pixels or size.shortest_edge,
        max_pixels=max_pixels or size.longest_edge,
    )


def trial_image(model: PreTrainedModel, rows: int, columns: int, seed: int) -> Image:
    """Noise that takes so many rows and columns of places."""
    from io import BytesIO

    from PIL.Image import fromarray

    processor = image_processor(_folder(model))
    side = processor.patch_size * processor.merge_size
    shape = rows * side, columns * side, 3
    data = BytesIO()
    fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(data, "PNG")
    return Image(data.getvalue(), *shape[:2])


def places_of(processor: Qwen2VLImageProcessorPil, image: Image) -> int:
    """How many placeholders an image takes."""
    side = processor.patch_size * processor.merge_size
    return (image.height // side) * (image.width // side)


def image_problem(model: PreTrainedModel, ids: np.ndarray, images: Sequence[Image]) -> str | None:
    """Why a model could not go on from token ids with these images, as the end of a sentence; None if it can."""
    processor = image_processor(_folder(model))
    side = processor.patch_size * processor.merge_size
    for number, image in enumerate(images, 1):
        if image.height % side or image.width % side or not image.height * image.width:
            return f"its image {number} is to be {image.width} × {image.height} pixels, no multiples of {side}"
        try:
            _patches(_folder(model), image)
        except BadImage as error:
            return f"its image {number} {error}"
    try:
        places = _places(ids, model.config.image_token_id, [places_of(processor, image) for image in images])
    except ValueError as error:
        return str(error)
    return "its last token is the place of an image: let text follow" if places[-1] == len(ids) - 1 else None


def image_inputs(
    model: PreTrainedModel,
    sequences: Sequence[np.ndarray],
    images: Sequence[Sequence[Image]],
    width: int | None = None,
) -> ImageInputs | None:
    """What the model reads beside the ids of some sequences, on its device; None where none has an image.

    The first placeholders of a sequence are those of its images: what was sampled later under the same id is a token.

    Args:
        width: tokens that the sequences are padded to, those of the longest by default.

    Raises:
        ValueError: the placeholders of a sequence are not those of its images.
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
        found = [_patches(_folder(model), image) for image in own]
        patches += [part for part, _ in found]
        own_grids = torch.tensor([grid for _, grid in found], dtype=torch.int64).view(-1, 3)
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
    """Arguments of a forward pass over sequences with images, beside their ids; the pass has to be made within.

    Where none of the sequences has one, the pass goes through the vision tower all the same, with an image that no
    place takes: ranks that share the model take part in it together, and its weights have a gradient, of 0.

    Raises:
        ValueError: as `image_inputs`.
    """
    with (image_inputs(model, sequences, images) or _nothing_seen(model, sequences)).given(model) as arguments:
        yield arguments


def _folder(model: PreTrainedModel) -> str:
    """That the model was loaded from."""
    return str(model.name_or_path)


def _places(ids: np.ndarray, token: int, counts: Sequence[int]) -> np.ndarray:
    """Where the placeholders of images stand: as many as each takes, side by side, something else between two images,
    which the library would take for one. Raises ValueError."""
    places = np.flatnonzero(ids == token)[: sum(counts)]
    if len(places) < sum(counts):
        raise ValueError(f"it has {len(places)} placeholders, and its images take {sum(counts)}")
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    if breaks.tolist() != np.cumsum(counts)[:-1].tolist():
        raise ValueError("the placeholders of an image are to stand side by side, with something between two images")
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


@lru_cache(maxsize=_KEPT_IMAGES)
def _patches(folder: str, image: Image) -> tuple[np.ndarray, list[int]]:
    """[p, values] float32 and (1, rows, columns)."""
    processor = image_processor(folder)
    pixels = processor.process_image(decode(image.data), do_convert_rgb=processor.do_convert_rgb)
    pixels = processor.resize(pixels, SizeDict(height=image.height, width=image.width), resample=processor.resample)
    features = processor.preprocess(
        [pixels], do_resize=False, do_convert_rgb=False, input_data_format="channels_first", return_tensors="np"
    )
    return features["pixel_values"].astype(np.float32, copy=False), features["image_grid_thw"][0].tolist()
