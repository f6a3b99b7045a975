"""What every section of a run's configuration has in common."""

from pydantic import BaseModel, ConfigDict


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
