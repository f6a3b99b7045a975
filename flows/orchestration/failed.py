"""The end of a flow run in an error: its state says what happened, and an artifact what to do.

A traceback of Cairn's own code is of no use to the reader of an expected error: it goes to the debug log
(`PREFECT_LOGGING_LEVEL=DEBUG`). Any other error is a bug, and its traceback stays in the log.
"""

import logging
import traceback
from contextlib import suppress
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.states import Failed, State

from cairn.configs.errors import BadInput, Failure
from cairn.flows.orchestration.artifacts.pages import board_link
from cairn.flows.reading.failure import RunFailure
from cairn.flows.text import code, plain, slug, table


def failed_state(error: Exception, failure: RunFailure, run: str) -> "State[Any]":
    """Return the state that the body of the current flow run must return; its caller then gets the error. Publishes
    the artifact `failure-<run>`."""
    level = logging.DEBUG if is_expected(error) else logging.ERROR
    trace = "".join(traceback.format_exception(error))
    get_run_logger().log(level, "Where the error was raised\n%s", trace)
    link = board_link(run if failure.stands else None)  # a run that did not start has no page
    with suppress(Exception):  # the server may be what failed
        create_markdown_artifact(
            key=f"failure-{slug(run) or 'run'}",
            markdown="\n\n".join([failure_page(failure), *link]),
            description="\n\n".join([plain(failure.sentence[:200]), *link]),
        )
    others = [fact for fact in failure.facts()[1:] if fact[0] != "commonest error"]
    lines = [failure.sentence, *(f"{name}: {text}" for name, text in (*others, *failure.commands(elsewhere=True)))]
    get_run_logger().error("\n".join(lines))
    return Failed(message="\n".join(lines), data=error)


def failure_page(failure: RunFailure) -> str:
    """Return a failure as Markdown."""
    rows = [(plain(name), plain(text)) for name, text in failure.facts()]
    rows += [(name, code(command)) for name, command in failure.commands(elsewhere=True)]
    return table(("", ""), rows)


def is_expected(error: BaseException | None) -> bool:
    """Whether an error is one that a correct program can have."""
    return isinstance(error, BadInput | Failure)


def without_traceback(record: logging.LogRecord) -> bool:
    """Move the traceback of an expected error to the debug log. A filter of a logger; passes every record."""
    if record.exc_info and is_expected(record.exc_info[1]):
        logger, trace = logging.getLogger(record.name), record.exc_info
        record.exc_info = record.exc_text = None
        logger.debug("Where the error was raised", exc_info=trace)
    return True
