"""The form of an evaluation in Prefect's interface, made as that of a run is (`cairn.flows.deployments.forms`)."""

from typing import TYPE_CHECKING

from cairn.configs.schema.benchmark import BenchmarkSampling
from cairn.configs.schema.engine_options import EngineOptions
from cairn.flows.deployments.forms import Form, form_of

if TYPE_CHECKING:
    Sampling = Form
    Engine = Form
else:
    Sampling = form_of(BenchmarkSampling, defaults=False)
    """How responses are drawn."""
    Engine = form_of(EngineOptions)
    """What weights are evaluated with."""

UNCHANGED_SAMPLING = Sampling()
UNCHANGED_ENGINE = Engine()
"""The forms as they are before anything is filled in."""
