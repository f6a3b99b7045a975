"""Commands of `cairn`, run in this process."""

from typer.testing import CliRunner, Result

from cairn.flows.cli import app


def cairn(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
