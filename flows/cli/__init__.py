"""`cairn`: the command line. Importing it is quick: what a command needs is imported when it runs."""

from cairn.flows.cli.app import app
from cairn.flows.cli.benchmarks import benchmarks
from cairn.flows.cli.board import board, watch
from cairn.flows.cli.command import command
from cairn.flows.cli.decisions import approve, keygen, pin, quarantine, reject, unpin
from cairn.flows.cli.evaluation import evaluate, leaderboard
from cairn.flows.cli.export import bundle, convert, export, unbundle
from cairn.flows.cli.history import diff, fork, replay, rescore, whatif
from cairn.flows.cli.housekeeping import delete, gc, probe, verify
from cairn.flows.cli.plan import plan
from cairn.flows.cli.query import sql
from cairn.flows.cli.reading import costs, report, runs, show, status, timeline
from cairn.flows.cli.sample import episode, lineage
from cairn.flows.cli.training import resume, train, up, validate

__all__ = ["app"]

LOOKING = (
    board,
    watch,
    runs,
    status,
    show,
    episode,
    sql,
    lineage,
    verify,
    report,
    costs,
    timeline,
    replay,
    rescore,
    whatif,
    diff,
    benchmarks,
)
WORKING = (train, resume, validate, plan, fork, convert, export, probe, up)
DECIDING = (approve, reject, pin, unpin, quarantine, keygen)
REMOVING = (gc, delete)
ONE_SAMPLE = (bundle, unbundle)

for function in (*WORKING, *LOOKING, *DECIDING, *REMOVING, *ONE_SAMPLE):
    app.command()(command(function))
app.command("eval")(command(evaluate))
app.command()(command(leaderboard))
