"""`cairn try`: a few prompts of a recipe, answered and graded before anything trains."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cairn.flows.cli.command import Shown
from cairn.flows.cli.printing import print_message, print_stderr, print_warning
from cairn.flows.cli.training import RecipeArgument, SetOption

if TYPE_CHECKING:
    from cairn.flows.driver.trying import Tried

MOST_IDS = 24
"""Token ids that are shown of a prompt or response; --json has all."""


def try_recipe(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    samples: Annotated[int, Option("--samples", metavar="N", min=1, max=1024, help="Number of prompts.")] = 4,
) -> Shown:
    """Answer and grade a few prompts of a recipe, and show them.

    Shown are text, tokens, masks, rewards and errors. The prompts are the first that a run would draw. The steps,
    engines, generate function and grader are the run's; nothing is trained, no training engine starts, and nothing is
    recorded. Exits with 1 if a sample failed.

    Examples:

    - `cairn try configs/recipes/quickstart.yaml`
    - `cairn try my.yaml --samples 16 --set reward.custom_rm_path=rewards.py:grade`
    - `cairn try my.yaml --json | jq '.[].reward'`
    """
    from cairn.configs.loader import load

    config = load(recipe, overrides or [], print_warning)
    from cairn.engines.fleet import warm

    warm.prepare(config)  # imports PyTorch meanwhile
    from cairn.flows.driver.trying import tried

    print_stderr(f"answering {samples} prompts; the engine starts first")
    found = tried(config, samples, print_message, print_warning)
    return Shown(found, _lines(found), failed=any(sample.error is not None for sample in found))


def _lines(found: "Sequence[Tried]") -> Iterator[str]:
    for number, sample in enumerate(found):
        yield f"── sample {number}"
        yield f"prompt ({len(sample.prompt_ids)} tokens): {_ids(sample.prompt_ids)}"
        yield _indented(sample.prompt)
        yield f"response ({len(sample.response_ids)} tokens, {sample.finish_reason}): {_ids(sample.response_ids)}"
        yield _indented(sample.response)
        yield f"trained on: {_mask(sample.loss_mask)}"
        if sample.label is not None:
            yield f"label: {sample.label}"
        if sample.error is not None:
            yield f"{sample.status}:"
            yield _indented(sample.error)
        else:
            others = f"; {sample.components}" if sample.components else ""
            yield f"reward: {sample.reward} by {sample.grader}{others}"
    rewards = [sample.reward for sample in found if sample.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    failed = sum(sample.error is not None for sample in found)
    yield f"{len(found)} samples{mean}{f', {failed} failed' if failed else ''}; nothing was trained or recorded"


def _ids(ids: Sequence[int]) -> str:
    more = f" … {ids[-1]}" if len(ids) > MOST_IDS else ""
    return " ".join(map(str, ids[:MOST_IDS])) + more


def _mask(mask: Sequence[int]) -> str:
    """Return a loss mask as runs of equal values: `12 tokens, then 7 not, then 3`."""
    if not mask:
        return "no token"
    runs: list[list[int]] = []
    for value in mask:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return f"{sum(mask)} of {len(mask)} tokens: " + ", ".join(f"{count} × {value}" for value, count in runs)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
