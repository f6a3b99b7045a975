"""MLflow: one MLflow run for each run, found by the tag `cairn.identity`, and resumed by every driver.

A point is one batch of metrics at a step; its last metric is `cairn/point` or `cairn/evaluation`. A point that an
earlier driver wrote partly lacks that metric and is written again. A database stores a metric with the same step, time
and value once.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from cairn.configs.schema.run import RunConfig
from cairn.flows.watching.trackers.tracker import Written
from cairn.storage.ledger.ledger import Ledger

_SQLITE = "sqlite:///"
IDENTITY = "cairn.identity"
_MARKS = {False: "cairn/point", True: "cairn/evaluation"}
"""Metric that is written last with a point; key: whether it is an evaluation."""
_PARAMS, _LONGEST = 100, 500
"""Number of parameters in a request, and of characters of a value, at most."""


class MlflowRun:
    """The board of one run in MLflow. Opening it may take seconds."""

    def __init__(self, ledger: Ledger, config: RunConfig) -> None:
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        tracking = config.tracking
        create_database(tracking.mlflow_tracking_uri)
        self._client = MlflowClient(tracking_uri=tracking.mlflow_tracking_uri)
        experiment = self._client.get_experiment_by_name(tracking.mlflow_experiment)
        place = experiment.experiment_id if experiment else self._client.create_experiment(tracking.mlflow_experiment)
        identity = ledger.manifest.identity
        existing = self._client.search_runs([place], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
        if existing:
            self._run: str = existing[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {IDENTITY: identity, "cairn.store": ledger.store.url}
            self._run = self._client.create_run(place, tags=tags, run_name=ledger.run).info.run_id
        self._log_configuration(config)

    def written(self) -> Written:
        iterations, evaluations = (
            {metric.step for metric in self._client.get_metric_history(self._run, _MARKS[is_evaluation])}
            for is_evaluation in (False, True)
        )
        return Written(iterations, evaluations)

    def write(self, step: int, metrics: Mapping[str, float], wall_time: float, *, is_evaluation: bool) -> None:
        from mlflow.entities import Metric

        milliseconds = round(1000 * wall_time)
        named = {_allowed(name): value for name, value in sorted(metrics.items())}
        points = [Metric(name, float(value), milliseconds, step) for name, value in named.items()]
        self._client.log_batch(self._run, metrics=points)
        self._client.log_metric(self._run, _MARKS[is_evaluation], step, milliseconds, step)

    def flush(self) -> None:
        """Do nothing: the server responds to a request when it is durable."""

    def close(self, *, completed: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if completed else "KILLED")

    def _log_configuration(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_LONGEST]) for name, value in _flat(config.model_dump(mode="json"))]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _PARAMS])


def create_database(uri: str) -> None:
    """Create the database of a new SQLite file atomically. MLflow creates it with hundreds of statements, and a driver
    that is killed meanwhile would leave a database that MLflow cannot open."""
    from mlflow.tracking import MlflowClient

    file = Path(uri.removeprefix(_SQLITE))
    if not uri.startswith(_SQLITE) or file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{uuid4().hex}")
    try:
        MlflowClient(tracking_uri=f"{_SQLITE}{temporary}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another driver was faster
            os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _allowed(name: str) -> str:
    """Return a metric's name in the characters that MLflow accepts."""
    return re.sub(r"[^\w./ -]", "_", name)


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
