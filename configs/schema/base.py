"""What every section of a run's configuration has in common."""

from pydantic import BaseModel, ConfigDict, ValidationInfo

RECORDED = {"recorded": True}
"""Validation context of a configuration that a run has in its ledger: it was sound by the rules of the version that
recorded it, and rules that were added since are not held against it."""


def is_recorded(info: ValidationInfo) -> bool:
    """Whether a configuration out of a ledger is validated."""
    return info.context == RECORDED


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
