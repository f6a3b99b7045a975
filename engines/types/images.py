"""Images of prompts: their bytes as in the data, and the size at which a model sees them.

PIL decodes them, only in the formats below; it is imported on first use. Nothing here imports PyTorch.
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
"""Supported formats. Of an animated image the first frame is used."""

MAX_PIXELS = 64 * 1024 * 1024
"""Maximum pixels of an image as it is stored: 192 MiB in RGB. An image with more is not decoded."""

_COLOURS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
"""Modes of PIL with eight bits per channel, which convert to RGB without loss of meaning."""


_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
"""Exif's orientation tag, and its values that swap height and width."""


class BadImage(Exception):
    """Bytes that are not a valid image. The message gives the reason, as the end of a sentence."""


@dataclass(frozen=True)
class Image:
    """An image of a prompt."""

    data: bytes
    """The encoded image, as in the data."""
    height: int
    """Height in pixels as the model sees it: the image is resized to this."""
    width: int

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the bytes in hex, which identifies the image in a ledger."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the image for a model: images with equal keys look the same."""
        return self.sha256, self.height, self.width


def size_of(data: bytes) -> tuple[int, int]:
    """Return (height, width) in pixels of the upright image, from its header. Raises BadImage."""
    from PIL import Image

    with _opened(data) as picture:
        height, width = picture.height, picture.width
        # PIL rotates TIFF images itself; the method of PNG's own class would decode the whole image.
        turned = picture.format != "TIFF" and Image.Image.getexif(picture).get(_ORIENTATION, 1) in _ON_ITS_SIDE
    return (width, height) if turned else (height, width)


def decode(data: bytes) -> "Picture":
    """Return the whole upright image in RGB, like `transformers.image_utils.load_image`. Raises BadImage."""
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
        raise BadImage(f"is not {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception as error:  # decoders raise whatever the libraries below them do
        raise BadImage(f"is broken ({_first_line(error)})") from error
    if picture.width * picture.height > MAX_PIXELS:
        raise BadImage(f"has {picture.width} × {picture.height} pixels, more than {MAX_PIXELS}")
    if picture.mode not in _COLOURS:
        raise BadImage(f"has pixels of PIL's mode {picture.mode}, which is not an 8-bit colour mode")
    return picture


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
