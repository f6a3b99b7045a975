"""`cairn`: the command line. Importing it is quick: what a command needs is imported when it runs."""

from cairn.flows.cli.app import app
from cairn.flows.cli.benchmarks import benchmarks
from cairn.flows.cli.bundle import bundle, unbundle
from cairn.flows.cli.convert import convert
from cairn.flows.cli.costs import costs, timeline
from cairn.flows.cli.decisions import approve, keygen, pin, quarantine, reject, unpin
from cairn.flows.cli.episode import episode
from cairn.flows.cli.evaluation import evaluate, leaderboard
from cairn.flows.cli.export import export
from cairn.flows.cli.history import diff, fork, replay
from cairn.flows.cli.housekeeping import delete, gc, probe
from cairn.flows.cli.lineage import lineage
from cairn.flows.cli.operating import up
from cairn.flows.cli.plan import plan
from cairn.flows.cli.query import sql
from cairn.flows.cli.reading import runs, show, status, verify
from cairn.flows.cli.report import report
from cairn.flows.cli.rescore import rescore
from cairn.flows.cli.training import resume, train, validate
from cairn.flows.cli.whatif import whatif

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
