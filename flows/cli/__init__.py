"""`cairn`: the command line. Importing it is quick: what a command needs is imported when it runs."""

from cairn.flows.cli.app import app
from cairn.flows.cli.evaluation import benchmarks, evaluate, leaderboard
from cairn.flows.cli.export import bundle, convert, export, unbundle
from cairn.flows.cli.history import diff, fork, replay, rescore, whatif
from cairn.flows.cli.housekeeping import approve, delete, gc, keygen, pin, probe, quarantine, reject, unpin
from cairn.flows.cli.plan import plan
from cairn.flows.cli.query import sql
from cairn.flows.cli.reading import costs, report, runs, show, status, timeline, verify
from cairn.flows.cli.sample import episode, lineage
from cairn.flows.cli.training import resume, train, up, validate

__all__ = ["app"]

LOOKING = (
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

for command in (*WORKING, *LOOKING, *DECIDING, *REMOVING, *ONE_SAMPLE):
    app.command()(command)
app.command("eval")(evaluate)
app.command()(leaderboard)
