"""Every launch script of a checkout of slime: imported, validated without files, and planned.

    python -m tests.flows.importing.slime_scripts DIR     # or: make slime-scripts SLIME=DIR

prints a table: what came of each script, and the first reason where a step did not succeed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cairn.configs.errors import BadInput
from cairn.configs.loader import load
from cairn.flows.driver.portable import portable_problems
from cairn.flows.importing.opening import recipe_of
from cairn.flows.plan.planning import plan_recipe
from cairn.flows.plan.subject import Plan

ENVIRONMENT = {"BASE_FOLDER": "/root", "BASE_DIR": "/root", "MASTER_ADDR": "127.0.0.1", "HOST_IP": "127.0.0.1"}
"""Variables that the scripts require."""


@dataclass(frozen=True)
class Result:
    """What came of a script."""

    script: str
    imported: str
    """`ok`, or why not."""
    validated: str = ""
    planned: str = ""
    left_out: int = 0

    @property
    def row(self) -> str:
        return f"{self.script:68} import {self.imported}; validate {self.validated or '-'}; plan {self.planned or '-'}"


def scripts(checkout: Path) -> list[Path]:
    """Return the scripts that start a training."""
    found = [*checkout.glob("scripts/run-*.sh"), *checkout.glob("scripts/low_precision/run-*.sh")]
    found += checkout.glob("examples/*/*.sh")
    return sorted(found)


def results(checkout: Path, folder: Path) -> Iterator[Result]:
    """Yield what comes of every script of a checkout; recipes are written into a folder."""
    for script in scripts(checkout):
        name = str(script.relative_to(checkout))
        try:
            draft = recipe_of(script, ENVIRONMENT)
        except BadInput as error:
            yield Result(name, str(error))
            continue
        recipe = folder / f"{script.parent.name}-{script.stem}.yaml"
        recipe.write_text(draft.text(name))
        if draft.problems:
            yield Result(name, f"to change: {draft.problems[0]}")
            continue
        config = load(recipe)
        problems = portable_problems(config)
        validated = problems[0] if problems else "ok"
        try:
            plan = plan_recipe(config, recipe.stem, "h100", memory_of_this_machine=2**41)
            size = f"{plan.gpus:g} GPUs, {plan.seconds:,.0f} s an iteration"
            planned = f"ok ({size})" if plan.fits else f"does not fit ({size}): {'; '.join(reasons(plan))}"
        except BadInput as error:
            planned = str(error)
        yield Result(name, "ok", validated, planned, len(draft.left_out))


def reasons(plan: Plan) -> Iterator[str]:
    """Yield why a plan does not fit."""
    yield from plan.problems
    for memory in plan.memory:
        if not memory.fits:
            yield f"{memory.of} needs {memory.total / 2**30:,.0f} of {memory.capacity / 2**30:,.0f} GiB"


def main() -> None:
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("build/slime-scripts")
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(sys.argv[1]).resolve()))  # as the scripts do with PYTHONPATH
    for result in results(Path(sys.argv[1]), folder):
        print(result.row, flush=True)


if __name__ == "__main__":
    main()
