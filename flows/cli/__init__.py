"""`cairn`: the command line. Importing it is quick: what a command needs is imported when it runs."""

from cairn.flows.cli.app import app
from cairn.flows.cli.convert import convert
from cairn.flows.cli.export import export
from cairn.flows.cli.history import diff, fork, replay
from cairn.flows.cli.housekeeping import delete, gc
from cairn.flows.cli.reading import runs, show, status, verify
from cairn.flows.cli.training import resume, train, up, validate

__all__ = ["app"]

looking = (runs, status, show, verify)
for command in (train, resume, validate, fork, *looking, replay, diff, convert, export, gc, delete, up):
    app.command()(command)
