"""`cairn import`: a recipe from a launch script or configuration of another trainer."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperGroup

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import Shown, writing
from cairn.flows.cli.printing import print_stderr, print_warning


class RecipeByDefault(TyperGroup):
    """Commands of which `recipe` need not be named."""

    default = "recipe"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def import_recipe(
    file: Annotated[
        Path, Argument(metavar="FILE", help="Launch script (.sh) of slime, verl or TRL, or YAML of verl or TRL.")
    ],
    output: Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write the recipe there.")] = None,
    environment: Annotated[
        list[str] | None,
        Option("--env", metavar="NAME=VALUE", help="Environment variable that the script sees; may be repeated."),
    ] = None,
) -> Shown:
    """Make a recipe of a launch script of slime, verl or TRL, or of a configuration of verl or TRL.

    The script is interpreted, and no program of this machine runs: it has no network and no processes, and sees only
    the files of its own checkout and the variables of `--env`. The recipe is printed as YAML. Comments say which flags
    have no effect here, and why. Exits with 1 if the recipe needs a change before it can be used.

    Examples:

    - `cairn import slime/scripts/run-qwen3-4B.sh -o qwen3-4B.yaml`
    - `cairn import run.sh --env BASE_FOLDER=/data --env MASTER_ADDR=10.0.0.1`
    - `cairn import run_grpo_verl.sh`
    - `cairn import grpo_config.yaml`
    """
    from cairn.flows.importing.opening import recipe_of

    pairs = [setting.partition("=") for setting in environment or []]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise BadInput(f"--env {name}{equals} is not of the form NAME=VALUE")
    draft = recipe_of(file, {name: value for name, _, value in pairs})
    text = draft.text(f"Made by `cairn import {file}`.")
    for note in draft.notes:
        print_warning(note)
    for problem in draft.problems:
        print_stderr(f"to change: {problem}")
    value = {"recipe": text, "left_out": dict(draft.left_out), "notes": draft.notes, "problems": draft.problems}
    shown = text.removesuffix("\n")
    if output is not None:
        if output.exists():
            raise BadInput(f"{output} exists already: use another name")
        with writing(output):
            output.write_text(text, "utf-8")
        count = len(draft.left_out)
        shown = f"{output}: {len(draft.values)} options; {count} flags have no effect here, as its last lines say"
    return Shown(value, shown, failed=bool(draft.problems))
