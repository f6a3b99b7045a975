"""Where a file lies: a path, or a URL without credentials."""

import re
from typing import Annotated

from pydantic import AfterValidator

_USER = re.compile(r"://([^/?#]*@|[^/?#:]*:(?!\d+(/|$))[^@]*@)")
"""User information, also where a key with a slash in it makes it look like a path."""
_SECRET = re.compile(r"[?&][^=&#]*(sig|token|key|secret|passw|credential|auth)[^=&#]*=", re.IGNORECASE)
"""A part of the query such as those of a signed URL."""


def has_credentials(url: str) -> bool:
    """Whether a URL carries a user, a password or a signature; false for what is no URL."""
    return "://" in url and (_USER.search(url) is not None or _SECRET.search(url) is not None)


def _without_credentials(url: str) -> str:
    if has_credentials(url):
        raise ValueError(
            "holds credentials, and whatever a configuration holds is recorded with the run: leave them out of the URL "
            "and set them where its file system looks for them (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_PROFILE), or copy the file"
        )
    return url


Location = Annotated[str, AfterValidator(_without_credentials)]
"""A path or an fsspec URL."""
