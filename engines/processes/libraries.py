"""Environment variables that libraries need in the processes of engines, from the table `configs/gpus.yaml`.

    inherited from the machine  <  the table  <  the configuration

The environment of the machine overrides values of the table that are not `fixed`. A process gets the variables without
a GPU too, where they have no effect. Nothing here imports PyTorch, which reads some of them once.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cairn.configs import yaml_file
from cairn.configs.schema.base import Section
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.training import TrainingConfig

Kind = Literal["trainer", "sglang"]
"""Kind of process: a training rank, or a server of SGLang with all that it starts."""

TABLE = Path(yaml_file.__file__).with_name("gpus.yaml")


class Variable(Section):
    """A row of the table."""

    variable: str
    """Name of the environment variable."""
    processes: tuple[Kind, ...]
    value: str | None
    """None removes the variable."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Options of `training`, and the values for which the row holds."""
    fixed: bool = False
    """Whether neither the environment of the machine nor an option changes the value."""
    why: str
    source: str
    """Library, version and line that read or set the variable."""

    def holds(self, training: TrainingConfig | None) -> bool:
        """Return whether the row holds under these options."""
        return all(getattr(training, option) == value for option, value in self.when.items())


@cache
def table() -> tuple[Variable, ...]:
    """Return all rows."""
    return tuple(map(Variable.model_validate, yaml_file.parse_yaml(TABLE.read_text(encoding="utf-8"))))


def environment(
    kind: Kind, inherited: Mapping[str, str], own: Mapping[str, str], training: TrainingConfig | None = None
) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        inherited: variables that it would have without the table.
        own: variables of the configuration: `training.train_env_vars` or `rollout.sglang_env_vars`.
        training: options of a trainer.
    """
    variables = dict(inherited)
    for row in _rows(kind, training):
        if row.value is None:
            variables.pop(row.variable, None)
        elif row.fixed:
            variables[row.variable] = row.value
        else:
            variables.setdefault(row.variable, row.value)
    return {**variables, **own}


def prepare_trainer(training: TrainingConfig) -> None:
    """Set the environment variables of this process, a training rank, before it imports PyTorch."""
    os.environ.update(environment("trainer", os.environ, training.train_env_vars, training))


def problems(rollout: RolloutConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield sentences on variables of the configuration that are fixed, or that come too late."""
    yield from _own_problems("training.train_env_vars", training.train_env_vars, "trainer", training)
    yield from _own_problems("rollout.sglang_env_vars", rollout.sglang_env_vars, "sglang", None)
    for name in training.train_env_vars:
        if name.startswith("LD_"):
            yield (
                f"training.train_env_vars.{name} is read when a process starts, before it is set: set it in the "
                "environment of `ray start`"
            )


def _rows(kind: Kind, training: TrainingConfig | None) -> Iterator[Variable]:
    return (row for row in table() if kind in row.processes and row.holds(training))


def _own_problems(option: str, own: Mapping[str, str], kind: Kind, training: TrainingConfig | None) -> Iterator[str]:
    for row in _rows(kind, training):
        if row.fixed and row.variable in own:
            needed = "".join(f" where training.{name} is {str(value).lower()}" for name, value in row.when.items())
            yield f"{option}.{row.variable} is set by Cairn{needed}: {row.why}; leave it out"
    for name, instead in _SET_BY.items():
        if name in own:
            yield f"{option}.{name} follows from {instead}: set that"


_SET_BY = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that Ray reserves for the process",
    "OMP_NUM_THREADS": "num_threads of the same section",
    "PYTHONPATH": "the installation of the process, which has its own modules",
}
"""Variables that Cairn sets from something else."""
