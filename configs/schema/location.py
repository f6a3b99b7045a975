"""Where something lies or is asked: a path, a URL or `host:port`, without credentials."""

import re
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator, ValidationInfo

from cairn.configs.schema.base import is_recorded

_USER = re.compile(r"//([^/?#]*@|[^/?#:]*:(?!\d+(/|$))[^@]*@)|^[^/?#@\s]*:[^/?#@\s]+@(?!\[)")
"""User information, also where a key with a slash in it makes it look like a path, and where there is no scheme."""
_SECRET = re.compile(
    r"[?&#;](?:[^=&#;]*(?:sig|token|key|secret|passw|passphrase|pwd|credential|auth|bearer|jwt)[^=&#;]*|code|sas)=",
    re.IGNORECASE,
)
"""A part of the query such as those of a signed URL; a function of Azure is asked with `code`."""


def has_credentials(address: str) -> bool:
    """Whether an address carries a user, a password or a signature, spelled out or percent-encoded."""
    return any(
        _USER.search(spelled) is not None or ("//" in spelled and _SECRET.search(spelled) is not None)
        for spelled in (address, unquote(address))
    )


def shown(address: str) -> str:
    """An address for a message."""
    return "an address with credentials" if has_credentials(address) else address


def _without_credentials(address: str, info: ValidationInfo) -> str:
    if has_credentials(address) and not is_recorded(info):
        raise ValueError(
            "holds credentials, and whatever a configuration holds is recorded with the run: leave them out of the "
            "address and set them in the environment, where whoever asks there looks for them (for S3: "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; docs/security.md has the others), or copy "
            "the file"
        )
    return address


Location = Annotated[str, AfterValidator(_without_credentials)]
"""The type of every option that says where something is: a path, an fsspec URL, a server, a database."""
