"""Commands for one sample on its own: bundle, unbundle."""

from pathlib import Path
from typing import Annotated

import typer

from cairn.flows.cli.app import FAILED, BadInput, JsonOption, RunArgument, StoreOption, print_json, say, tell
from cairn.flows.cli.reading import open_ledger, read_signers_of
from cairn.storage.layout import LAST_NUMBER


def bundle(
    run: RunArgument,
    iteration: Annotated[
        int, typer.Argument(metavar="ITER", min=0, max=LAST_NUMBER, help="Number of the iteration, from 0.")
    ],
    sample: Annotated[int, typer.Argument(metavar="SAMPLE", min=0, help="Its number, as `cairn show` counts.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip file to write; must not be there yet.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="With the newest checkpoint at or below the weights that sampled it.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Put everything that one sample came from and went into in one file, to be read anywhere.

    Its prompt, response, tokens and log-probs, its grade, its advantage, the update that consumed it, and the chain of
    commits back to the first, byte for byte, with their signatures; the source of a grader of your own. `cairn
    unbundle` checks all of it without the store. The tables of its shard are whole, with the other samples in them.

    Examples:

    - `cairn bundle quickstart 39 17 sample.zip`
    """
    from cairn.flows.export.bundle import bundle as bundled

    try:
        made = bundled(open_ledger(store, run), iteration, sample, file, weights=weights)
    except (LookupError, FileExistsError) as error:
        raise BadInput(f"{file} is there already" if isinstance(error, FileExistsError) else str(error)) from None
    except OSError as error:
        raise BadInput(f"{file} cannot be written: {error.strerror}") from None
    if json:
        print_json(made.model_dump(mode="json"))
        return
    say(f"{file}: sample {sample} of iteration {iteration} of run {run}, up to {made.newest}")
    if weights:
        say(f"with the weights of {made.checkpoint}" if made.checkpoint else "without weights: no checkpoint is there")
    say(f"check it with: cairn unbundle {file}")


def unbundle(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `cairn bundle` wrote.")],
    signers: Annotated[
        Path | None,
        typer.Option("--signers", metavar="FILE", help="Lines of NAME KEY: whose signature every commit must have."),
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run the grader's source that is in the bundle.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a bundle, without the store that it is from, and grade its sample again. Exits with 1 if anything is wrong.

    Checked are all digests, the chain of commits back to the first, signatures where signers are given, and that the
    same version of the grader gives the recorded reward. Generation and training are not done again. A bundle that is
    consistent may still be all made up: compare the digest of its newest commit, or give signers.

    Examples:

    - `cairn unbundle sample.zip`
    - `cairn unbundle sample.zip --signers team.txt --json`
    """
    from cairn.flows.export.unbundle import BadBundle, check

    names = read_signers_of(signers)
    try:
        found = check(file, signers=names, trust_code=trust_code)
    except BadBundle as error:
        tell(str(error))
        raise typer.Exit(FAILED) from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        made = found.contents
        for problem in found.problems:
            say(problem)
        sample = f"sample {made.sample_index} of group {made.group_id}"
        say(f"{sample}, iteration {made.iteration} of run {made.run}, up to {made.newest}")
        say(f"prompt    {found.prompt}")
        say(f"response  {found.response}")
        again = f"not graded again: {found.not_graded}" if found.not_graded else f"graded again: {found.graded_again}"
        say(f"reward    {found.reward}, {again}")
        verdict = f"{len(found.problems)} problems" if found.problems else "all of it is what was committed"
        say(f"{found.commits} commits, {found.tables} tables and checkpoint files read; {verdict}")
        say(f"digest of {made.newest}: {made.newest_digest}")
    if found.problems:
        raise typer.Exit(FAILED)
