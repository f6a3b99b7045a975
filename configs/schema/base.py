"""What every section of a run's configuration has in common."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, ValidationInfo

from cairn.configs.plugins import Unchecked

UNCHECKED = {"unchecked": True}
"""Validation context of a configuration with values out of a store: the code that it names is not imported before it
passed `cairn.flows.driver.trust`."""


def _unchecked(name: str, info: ValidationInfo) -> str:
    return Unchecked(name) if "." in name and (info.context or {}).get("unchecked") else name


Code = Annotated[str, AfterValidator(_unchecked)]
"""A name of ours, or where code of the user's is: `package.module.function` or `file.py:function`."""


class Section(BaseModel):
    """A frozen group of options. The docstring under a field is its description in forms and in `--help`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    _refusal: Callable[[str], Exception] | None = PrivateAttr(default=None)
    """Of a section that was restricted: the error for reading a field that it lacks."""

    def restricted_to(self, fields: Mapping[str, Any], refusal: Callable[[str], Exception]) -> Self:
        """Returns a copy that has these fields alone; reading another one raises `refusal(name)`."""
        copy = self.model_copy()
        copy.__dict__.clear()
        copy.__dict__.update(fields)
        copy._refusal = refusal
        return copy

    if not TYPE_CHECKING:  # only reached by a field that is not there

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields and self._refusal is not None:
                raise self._refusal(name)
            return super().__getattr__(name)


# Where something lies or is asked: a path, a URL or `host:port`, without credentials.


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


def _without_credentials(address: str) -> str:
    if has_credentials(address):
        raise ValueError(
            "holds credentials, and whatever a configuration holds is recorded with the run: leave them out of the "
            "address and set them in the environment, where whoever asks there looks for them (for S3: "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; docs/security.md has the others), or copy "
            "the file"
        )
    return address


Location = Annotated[str, AfterValidator(_without_credentials)]
"""The type of every option that says where something is: a path, an fsspec URL, a server, a database."""
