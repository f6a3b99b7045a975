"""Images of rows: where a row has them, and the places that they take in its prompt.

A column, `multimodal_keys.image`, holds one image or a list of them, each as

| value | is |
|---|---|
| `{"bytes": …}` of Parquet | the encoded picture; so Hugging Face's data sets have it |
| `data:image/png;base64,…` | the same as text |
| a path, or `{"path": …}` without bytes | a file beside the data's own, or at an absolute path of this machine |

They stand in the prompt where it says `<image>`, or where a message has a part `{"type": "image"}`, in order.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import fsspec

from cairn.configs.schema.data import RowFormat
from cairn.engines.images import BadImage, Image, decode, size_of
from cairn.storage import canonical
from cairn.tasks.data.errors import BadData, BadPrompt

PLACE = "<image>"
"""Stands in a text for an image."""

_DATA_URL = "data:"
_MAX_BYTES = 256 * 1024 * 1024
"""Of an encoded picture."""


class RowImages:
    """The images of a data set's rows, in the size in which a model sees them."""

    def __init__(self, format: RowFormat, folder: str, beside: str | None = None) -> None:
        """`folder`: of the model. `beside`: the file that the rows are of, which relative paths are beside. Raises
        BadData where the model sees no images."""
        from cairn.engines.models import check_model_folder, sees_images  # what few data sets need
        from cairn.engines.vision import image_processor

        config = check_model_folder(folder)
        if not sees_images(config):
            raise BadData(
                f"multimodal_keys names a column of images, and the model in {folder} ({config.model_type}) sees none: "
                "leave it out, or take a model of images and text"
            )
        self.column = format.multimodal_keys["image"]
        self._pixels = format.min_pixels, format.max_pixels
        self._beside = None if beside is None else os.path.dirname(beside)
        self._processor = image_processor(folder)
        size: Any = self._processor.size
        if (format.min_pixels or 0) > (most := format.max_pixels or size.longest_edge):
            raise BadData(
                f"min_pixels is {format.min_pixels}, above the {most} pixels that the model's own processor allows: "
                "set max_pixels too"
            )
        self._token: int = config.image_token_id
        self._files: dict[str, str] | None = None
        """SHA-256 of every file that a row names, by its path, once all rows were looked at."""
        self._found: dict[str, str] = {}
        self._has_column = False

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Look at the header of every image of a row. Raises BadPrompt."""
        self._of(row, where)
        self._has_column |= self.column in row

    def end_checks(self, path: str) -> None:
        """All rows, of `path`, were looked at: no file is to change from now on. Raises BadData where no row has the
        column."""
        if not self._has_column:
            raise BadData(f"multimodal_keys.image is {self.column}, which no row of {path} has: correct it")
        self._files = self._found

    def fingerprint(self, of_rows: str) -> str:
        """SHA-256, in hex, of the rows and of the files that they name. `of_rows`: that of the rows."""
        return canonical.digest({"rows": of_rows, "files": self._files}) if self._files else of_rows

    def of(self, row: Mapping[str, Any], where: str) -> tuple[Image, ...]:
        """Those of a row, each decoded once. Raises BadPrompt."""
        images = self._of(row, where)
        for number, image in enumerate(images, 1):
            try:
                decode(image.data)
            except BadImage as error:
                raise BadPrompt(f"{where}: image {number} {error}: correct or remove the row") from None
        return images

    def laid(self, ids: Sequence[int], images: Sequence[Image], where: str) -> tuple[int, ...]:
        """A prompt's token ids with as many placeholders for each image as it takes, in place of one. Raises
        BadPrompt."""
        from cairn.engines.vision import places_of

        places = [place for place, id in enumerate(ids) if id == self._token]
        if len(places) != len(images):
            raise BadPrompt(
                f"{where} has {len(images)} images and {len(places)} places for them in its prompt: write {PLACE} "
                "where each is to stand"
            )
        if any(after - place == 1 for place, after in pairwise([*places, len(ids)])):
            raise BadPrompt(f"{where} has an image with no text after it: let some follow each")
        left, found = iter(images), list[int]()
        for id in ids:
            found += [id] * places_of(self._processor, next(left)) if id == self._token else [id]
        return tuple(found)

    def _of(self, row: Mapping[str, Any], where: str) -> tuple[Image, ...]:
        from cairn.engines.vision import resized

        images = []
        value = row.get(self.column)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for number, one in enumerate(values, 1):
            try:
                data = self._bytes(one, where)
                height, width = size_of(data)
                images.append(Image(data, *resized(self._processor, height, width, *self._pixels)))
            except (BadImage, ValueError) as error:
                raise BadPrompt(f"{where}: image {number} {error}: correct or remove the row") from None
        return tuple(images)

    def _bytes(self, value: Any, where: str) -> bytes:
        """Of an image, as a row has it. Raises BadImage."""
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if not isinstance(value, str):
            raise BadImage(f"is a {type(value).__name__}, and neither bytes, a data URL nor a path")
        if value.startswith(_DATA_URL):
            try:
                return base64.b64decode(value.partition(";base64,")[2], validate=True)
            except binascii.Error:
                raise BadImage("is a data URL whose base64 is broken") from None
        return self._read(value, where)

    def _read(self, path: str, where: str) -> bytes:
        if "://" in path:
            raise BadImage(f"is at the address {path}, and nothing is fetched: put the file beside the data")
        if not os.path.isabs(path) and self._beside is None:
            raise BadImage(f"has the relative path {path}, and the data are no file that it could be beside")
        remote = self._beside is not None and "://" in self._beside
        if remote and os.path.isabs(path):
            raise BadImage(f"has the absolute path {path}, and the data are elsewhere: give one that is beside them")
        url = f"{self._beside}/{path}" if remote else os.path.join(self._beside or "", path)
        try:
            with fsspec.open(url, "rb") as file:
                data: bytes = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            raise BadImage(f"does not exist at {url}") from None
        # Every file system of fsspec raises exceptions of its own, and so do the libraries below it.
        except Exception as error:
            raise BadImage(f"cannot be read at {url} ({error})") from error
        if len(data) > _MAX_BYTES:
            raise BadImage(f"has more than {_MAX_BYTES} bytes at {url}")
        sha256 = hashlib.sha256(data).hexdigest()
        if self._files is None:
            self._found[path] = sha256
        elif self._files.get(path, sha256) != sha256:
            raise BadData(f"{where}: {url} was changed while it was in use: put the old file back, or start a new run")
        return data


def with_parts(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Messages with texts cut into parts at the places of images, as chat templates take them. Raises BadPrompt."""
    return [{**message, "content": _parts(message.get("content"), where)} for message in messages]


def _parts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        if PLACE not in content:
            return content
        texts = content.split(PLACE)
        parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]
    if not isinstance(content, list):
        return content
    for part in content:
        if part["type"] == "image" and len(part) > 1:
            raise BadPrompt(f"{where}: a part of a message has an image of its own: put it into the column of images")
    return content
