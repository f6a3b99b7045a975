"""What every section of a run's configuration has in common."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

from cairn.configs.plugins import Unchecked

RECORDED = {"recorded": True}
"""Validation context of a configuration that a run has in its ledger: it was sound by the rules of the version that
recorded it, and rules that were added since are not held against it."""
UNCHECKED = {"unchecked": True}
"""Validation context of a configuration with values out of a store: the code that it names is not imported before it
passed `cairn.flows.driver.trust`."""


def is_recorded(info: ValidationInfo) -> bool:
    """Whether a configuration out of a ledger is validated."""
    return bool((info.context or {}).get("recorded"))


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
