"""Common parts of all sections of a run's configuration."""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from cairn.configs.plugins import Unchecked

RECORDED = {"recorded": True}
"""Validation context of a configuration from a ledger: see `rule`."""
UNCHECKED = {"unchecked": True}
"""Validation context of a configuration with values from a store. The code that it names is not imported before the
configuration has passed `cairn.flows.driver.trust`."""


def _unchecked(name: str, info: ValidationInfo) -> str:
    return Unchecked(name) if "." in name and (info.context or {}).get("unchecked") else name


class FromStore(StrEnum):
    """Kinds of values that a store may set an option to. `cairn.flows.driver.trust` has the rule of each.

    Only the user may set an option that is not marked so, unless it holds nothing but numbers, switches and words of a
    fixed set.
    """

    TEXT = "text"
    CODE = "code"
    MODEL_FOLDER = "model folder"
    DATA = "data"
    TEMPLATE_ARGUMENTS = "template arguments"
    WORDS = "words"
    ENGINE_OPTIONS = "engine options"
    SERVER = "server"
    SERVICE = "service"
    CLUSTER = "cluster"
    API_KEY_NAME = "name of an API key"
    OUTPUT_FOLDER = "output folder"
    DATABASE = "database"


Text = Annotated[str, FromStore.TEXT]
"""Text that is looked up, compared or shown: it can only change what is computed."""
Code = Annotated[str, AfterValidator(_unchecked), FromStore.CODE]
"""Name of a built-in function, or path of user code: `package.module.function` or `file.py:function`."""


def rule(check: Callable[[Any], None]) -> Any:
    """Make a method of a section a rule between its options, which raises ValueError.

    Recorded configurations met the rules of the version that recorded them: they are not checked again when they are
    read, which is then quick, but before they are executed.
    """

    def checked(section: Any, info: ValidationInfo) -> Any:
        if not (info.context or {}).get("recorded"):
            check(section)
        return section

    checked.__name__, checked.__doc__ = check.__name__, check.__doc__
    return model_validator(mode="after")(checked)


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
    """On a restricted section: makes the error for reading a field that it lacks."""

    def restricted_to(self, fields: Mapping[str, Any], refusal: Callable[[str], Exception]) -> Self:
        """Return a copy that has these fields alone; reading another one raises `refusal(name)`."""
        copy = self.model_copy()
        copy.__dict__.clear()
        copy.__dict__.update(fields)
        copy._refusal = refusal
        return copy

    @property
    def is_read_by_user_code(self) -> bool:
        """Whether code of the user may read any option of this section."""
        return False

    def default_of(self, option: str) -> Any:
        """Return the value of an option that is left out."""
        return type(self).model_fields[option].get_default(call_default_factory=True)

    if not TYPE_CHECKING:  # only reached by a field that is not there

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields and self._refusal is not None:
                raise self._refusal(name)
            return super().__getattr__(name)


# Addresses: a path, a URL or `host:port`, without credentials.


_USER = re.compile(r"//([^/?#]*@|[^/?#:]*:(?!\d+(/|$))[^@]*@)|^[^/?#@\s]*:[^/?#@\s]+@(?!\[)")
"""Matches user information, also in addresses without a scheme, and where a slash in the key makes the address look
like a path."""
_SECRET = re.compile(
    r"[?&#;](?:[^=&#;]*(?:sig|token|key|secret|passw|passphrase|pwd|credential|auth|bearer|jwt)[^=&#;]*|code|sas)=",
    re.IGNORECASE,
)
"""Matches query parameters such as those of a signed URL; Azure functions take their key as `code`."""


def has_credentials(address: str) -> bool:
    """Whether an address carries a user, a password or a signature, in plain text or percent-encoded."""
    return any(
        _USER.search(spelled) is not None or ("//" in spelled and _SECRET.search(spelled) is not None)
        for spelled in (address, unquote(address))
    )


def displayed_address(address: str) -> str:
    """Return an address in a form that messages may show."""
    return "an address with credentials" if has_credentials(address) else address


def _without_credentials(address: str) -> str:
    if has_credentials(address):
        raise ValueError(
            "holds credentials, and a configuration is recorded with the run: leave them out of the address and set "
            "them in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
            "docs/security.md has the others), or copy the file"
        )
    return address


Location = Annotated[str, AfterValidator(_without_credentials)]
"""Type of every option that holds an address: a path, an fsspec URL, a server, a database."""
DataPath = Annotated[Location, FromStore.DATA]
ModelFolder = Annotated[Location, FromStore.MODEL_FOLDER]
OutputFolder = Annotated[Location, FromStore.OUTPUT_FOLDER]
ServerUrl = Annotated[Location, FromStore.SERVER]
"""Server that receives weights or samples, without a key."""
ServiceUrl = Annotated[Location, FromStore.SERVICE]
"""Server that grades samples."""
ApiKeyName = Annotated[str, FromStore.API_KEY_NAME]
"""Environment variable with a secret."""
EngineOptions = Annotated[dict[str, Any], FromStore.ENGINE_OPTIONS]
"""An engine's own options."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)


def _as_variables(values: Any) -> Any:
    """Return environment variables with numbers and switches of YAML as text."""
    if not isinstance(values, dict):
        return values
    for name in values:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if _SECRET_NAME.search(name):
            raise ValueError(
                f"{name} looks like a secret, and a configuration is recorded with the run: leave it out, and set it "
                "in the environment of the machine"
            )
    texts = {True: "true", False: "false"}
    return {
        name: texts[value] if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value
        for name, value in values.items()
    }


Variables = Annotated[dict[str, str], BeforeValidator(_as_variables)]
"""Environment variables of a process, by name. They may change what it runs, so only the user sets them."""
