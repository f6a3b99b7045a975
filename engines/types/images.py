"""Images of prompts: their bytes as the data hold them, and the size in which a model sees them.

PIL reads them, in the formats below and no other; it is imported where there are some. Nothing here loads PyTorch.
"""

import hashlib
import io
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Of an animated one, the first picture is read."""

MAX_PIXELS = 64 * 1024 * 1024
"""Pixels of a picture as it is stored: 192 MiB as colours. One with more is not decoded."""

_COLOURS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
"""Modes of PIL with eight bits a channel, which become RGB without loss of meaning."""


_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
"""Exif's tag of how a picture was taken, and its values that swap height and width."""


class BadImage(Exception):
    """Bytes that give no picture. The message says what of them is wrong, as the end of a sentence."""


@dataclass(frozen=True)
class Image:
    """One image of a prompt."""

    data: bytes
    """As the data hold it, encoded."""
    height: int
    """In pixels, as the model sees it: the picture is resized to this."""
    width: int

    @cached_property
    def sha256(self) -> str:
        """Of the bytes, in hex: what names the image in a ledger."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def key(self) -> tuple[str, int, int]:
        """Images with equal ones are the same to a model."""
        return self.sha256, self.height, self.width


def size_of(data: bytes) -> tuple[int, int]:
    """(height, width) in pixels, read off the header, upright. Raises BadImage."""
    from PIL import Image

    with _opened(data) as picture:
        height, width = picture.height, picture.width
        # PIL turns TIFF's by itself; the method of PNG's own class decodes the whole picture.
        turned = picture.format != "TIFF" and Image.Image.getexif(picture).get(_ORIENTATION, 1) in _ON_ITS_SIDE
    return (width, height) if turned else (height, width)


def decode(data: bytes) -> "Picture":
    """The whole picture, upright, in RGB, as `transformers.image_utils.load_image` gives it. Raises BadImage."""
    from PIL import ImageOps

    with _opened(data) as picture:
        try:
            return ImageOps.exif_transpose(picture).convert("RGB")
        except Exception as error:  # decoders raise whatever the libraries below them do
            raise BadImage(f"is broken ({_first_line(error)})") from error


def _opened(data: bytes) -> "Picture":
    import PIL.Image
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # MAX_PIXELS is less
            picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception as error:  # decoders raise whatever the libraries below them do
        raise BadImage(f"is broken ({_first_line(error)})") from error
    if picture.width * picture.height > MAX_PIXELS:
        raise BadImage(f"has {picture.width} × {picture.height} pixels, more than {MAX_PIXELS}")
    if picture.mode not in _COLOURS:
        raise BadImage(f"has pixels of PIL's mode {picture.mode}, which are no colours of eight bits")
    return picture


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
