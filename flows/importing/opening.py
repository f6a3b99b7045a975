"""Which trainer a file is for, and its recipe."""

from collections.abc import Mapping
from pathlib import Path

from cairn.configs.errors import BadInput
from cairn.configs.yaml_file import read_mapping
from cairn.flows.importing import slime, trl, verl
from cairn.flows.importing.draft import Draft
from cairn.flows.importing.launch import launch_of


def recipe_of(file: Path, environment: Mapping[str, str]) -> Draft:
    """Return the recipe of a launch script of slime, verl or TRL, or of a YAML configuration of the latter two.

    Args:
        environment: variables that a script sees.

    Raises:
        BadInput: the file is none of these.
    """
    if file.suffix in (".yaml", ".yml"):
        values = read_mapping(file, "name a launch script or a configuration", "a configuration")
        if not verl.is_verl(values) and not trl.is_trl(values):
            raise BadInput(f"{file} is a configuration of neither verl's PPO trainer nor TRL's GRPO trainer")
        draft = verl.recipe_of(verl.flat(values)) if verl.is_verl(values) else trl.recipe_of(values)
    else:
        launch = launch_of(file, environment)
        if launch.program.startswith("verl."):
            draft = verl.recipe_of(verl.overrides(launch.arguments))
        elif launch.program in ("train.py", "train_async.py"):
            draft = slime.recipe_of(launch)
        elif launch.program == "grpo" or trl.is_trl(trl.options(launch)):
            draft = trl.recipe_of(trl.options(launch))
        else:
            raise BadInput(
                f"{file} starts {launch.program}, which is none of slime's train.py and train_async.py, verl's "
                "verl.trainer.main_ppo and TRL's GRPO"
            )
        draft.notes += launch.notes
    draft.problems = draft.without_idle()
    return draft
