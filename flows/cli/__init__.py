"""`cairn`: the command line. Importing it is quick: what a command needs is imported when it runs."""

import typer

from cairn.flows.cli.app import app, main
from cairn.flows.cli.benchmarks import benchmarks
from cairn.flows.cli.board import board, watch
from cairn.flows.cli.command import command
from cairn.flows.cli.decisions import approve, keygen, pin, quarantine, reject, unpin
from cairn.flows.cli.evaluation import bisect, evaluate, leaderboard
from cairn.flows.cli.export import bundle, convert, export, unbundle
from cairn.flows.cli.history import compare, diff, fork, replay, rescore, whatif
from cairn.flows.cli.housekeeping import delete, gc, probe, verify
from cairn.flows.cli.importing import RecipeByDefault, import_recipe
from cairn.flows.cli.plan import plan
from cairn.flows.cli.query import sql
from cairn.flows.cli.reading import costs, report, runs, show, status, timeline
from cairn.flows.cli.sample import episode, lineage
from cairn.flows.cli.traces import traces
from cairn.flows.cli.training import resume, train, up, validate
from cairn.flows.cli.trying import try_recipe

__all__ = ["app", "main"]

GROUPS = {
    "Run": (train, resume, validate, try_recipe, plan, fork, up),
    "Look": (board, watch, runs, status, show, episode, lineage, sql, report, costs, timeline),
    "Compare and repeat": (compare, diff, bisect, replay, rescore, whatif),
    "Evaluate": (evaluate, leaderboard, benchmarks),
    "Decide": (approve, reject, pin, unpin, quarantine),
    "Take in and out": (export, convert, bundle, unbundle),
    "Maintain a store": (verify, gc, delete, probe, keygen),
}
"""Commands by the panel of `cairn --help` that lists them."""

NAMES = {evaluate: "eval", try_recipe: "try"}

for panel, functions in GROUPS.items():
    for function in functions:
        app.command(NAMES.get(function, function.__name__), rich_help_panel=panel)(command(function))

imports = typer.Typer(
    cls=RecipeByDefault,
    no_args_is_help=True,
    help="Import a launch script as a recipe, or traces as a run.\n\n`cairn import FILE` is short for `cairn import "
    "recipe FILE`.",
)
imports.command("recipe")(command(import_recipe))
imports.command()(command(traces))
app.add_typer(imports, name="import", rich_help_panel="Take in and out")
