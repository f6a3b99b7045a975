"""Commands that show runs while they are at work: board, watch."""

from typing import Annotated

import typer
from typer import Option

from cairn.flows.cli.command import FAILED, JsonOption, Root, RunArgument
from cairn.flows.cli.failing import box_lines
from cairn.flows.cli.printing import print_stderr, say
from cairn.flows.cli.reading import PriceOption


def board(
    root: Root,
    host: Annotated[
        str, Option("--host", metavar="ADDRESS", help="Address to listen on; everyone who can reach it sees all runs.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port of the page; 0 uses a free one.")] = 4201,
    price: PriceOption = None,
) -> None:
    """Show all runs of a store in a browser, live, until Ctrl-C.

    The page has a table of runs, curves over each other, and samples as they come. The page of a run is its report,
    kept up to date: a new iteration appears within a second of its commit. The address that is printed has a token
    after `#`. With it the page also cancels, forks, approves and rejects; without it the
    page only shows. The board reads the store, and only while somebody looks. `cairn up` serves one too.

    Examples:

    - `cairn board`
    - `cairn board --store s3://bucket/experiments --port 8000 --price 2.50`
    - `ssh -L 4201:localhost:4201 machine`, for the board of another machine
    """
    from cairn.flows.board.serving import address, listen, new_token, serve
    from cairn.flows.orchestration.server import is_loopback

    store = root.store
    listener, token = listen(host, port), new_token()
    if not is_loopback(host):
        print_stderr(f"everyone who can reach {host} sees prompts, samples and configurations: restrict access")
    say(f"the board of {store.url}: {address(listener)}/#token={token}")
    print_stderr("the part after # is a token: only who has it may change anything; Ctrl-C stops the board")
    serve(store, listener, token, price)


def watch(root: Root, run: RunArgument, json: JsonOption = False) -> None:
    """Watch a run in the terminal while another process drives it.

    Shown are iterations as they are done, the curve, the step and the newest sample. The command reads the ledger and
    disturbs nothing. It ends when the run does, with 1 where the run failed or was interrupted; Ctrl-C ends only the
    command. With `--json` it prints a line for each iteration, and one for each change of state or step.

    Examples:

    - `cairn watch quickstart` in a second terminal, or on another machine with `--store s3://…`
    - `cairn watch quickstart --json | jq -c 'select(.iteration) | [.iteration, .reward]'`
    """
    from json import dumps

    from cairn.flows.board.reader import RunReader
    from cairn.flows.board.terminal import lines, show
    from cairn.flows.reading.views import RunState

    reader = RunReader(root.store, root.ledger(run).run)
    if json:
        for line in lines(reader):
            print(dumps(line), flush=True)
        state = reader.status.state
    else:
        status = show(reader)
        state, title = status.state, f"run {status.run} is {status.state}"
        say(f"{title}, with {status.iterations} of {status.num_rollout} iterations")
        if status.failure is not None:
            say("\n".join(box_lines(title, status.failure)))
    if state is not RunState.COMPLETED:
        raise typer.Exit(FAILED)
