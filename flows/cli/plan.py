"""`cairn plan`: the resources that a recipe needs, computed before any machine is used."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cairn.flows.cli.command import Shown
from cairn.flows.cli.printing import print_warning
from cairn.flows.cli.reading import PriceOption
from cairn.flows.cli.tables import grid
from cairn.flows.cli.training import RecipeArgument, SetOption
from cairn.flows.text import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cairn.flows.plan.subject import Plan

_CACHE = "keys and values"
_FILLED = f": {_CACHE} take what is left"


def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    gpu: Annotated[
        str | None, Option("--gpu", metavar="NAME", help="Type of the GPUs: h200, b200, …; by default fleet.gpu.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        Option("--gpus-per-node", metavar="N", min=1, help="GPUs per machine; by default rollout.num_gpus_per_node."),
    ] = None,
    prompt_tokens: Annotated[
        float | None, Option("--prompt-tokens", metavar="N", min=1, help="Mean number of tokens in a prompt.")
    ] = None,
    response_tokens: Annotated[
        float | None,
        Option("--response-tokens", metavar="N", min=1, help="The same for a response; by default half the maximum."),
    ] = None,
    mfu: Annotated[
        float | None, Option("--mfu", min=0.001, max=1, help="Share of a GPU's peak FLOP/s that training reaches.")
    ] = None,
    mbu: Annotated[
        float | None, Option("--mbu", min=0.001, max=1, help="Share of a GPU's memory bandwidth that decoding reaches.")
    ] = None,
    price: PriceOption = None,
) -> Shown:
    """Compute the memory, time and money that a recipe needs.

    Neither GPUs nor weights are needed. The command reads the model's config.json, or uses the published facts of a
    model with the folder's name. Memory is computed for the longest samples, time for average ones, from the rates of
    the named GPUs. Exits with 1 if the recipe does not fit or cannot run so, and names options that would change that.

    Examples:

    - `cairn plan Qwen3-4B`
    - `cairn plan my.yaml --gpu h200 --response-tokens 3000 --price 2.50`
    - `cairn plan my.yaml --set training.world_size=16 --json`
    """
    import psutil

    from cairn.configs.catalogue import USUAL_GPU
    from cairn.configs.loader import load
    from cairn.flows.plan.planning import plan_recipe

    changes = list(overrides or [])
    if gpus_per_node is not None:
        changes.append(f"rollout.num_gpus_per_node={gpus_per_node}")
    config = load(recipe, changes, print_warning)
    found = plan_recipe(
        config,
        recipe.stem,
        gpu or config.fleet.gpu or USUAL_GPU,
        memory_of_this_machine=psutil.virtual_memory().total,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rates={name: rate for name, rate in (("mfu", mfu), ("mbu", mbu)) if rate is not None},
    )
    whole = {"seconds": found.run_seconds, "gpu_hours": found.gpu_hours, "price": _money(found.gpu_hours, price)}
    value = {
        **found.model_dump(mode="json"),
        "fits": found.fits,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "run": whole,
    }
    return Shown(value, _parts(found, price), failed=not found.fits)


def _money(gpu_hours: float | None, price: float | None) -> float | None:
    return None if gpu_hours is None or price is None else gpu_hours * price


def _parts(plan: "Plan", price: float | None) -> "Iterator[RenderableType]":
    """Yield a table of the memories, and lines for everything else."""
    from rich.text import Text

    model = plan.model
    on = f"{plan.gpus:g} {plan.gpu} on {_machines(plan.machines)}" if plan.gpus else "no GPU"
    yield f"{plan.recipe}: {model.name} ({model.architecture}, {model.layers} layers) on {on}"
    yield f"config of the model: {model.source}"
    table = grid("", "GiB", "", right=("GiB",))
    table.add_row("parameters", _billions(model.parameters), "billions")
    table.add_row("active per token", _billions(model.active_parameters), "billions")
    for memory in plan.memory:
        table.add_section()
        style = "" if memory.fits else "bold red"
        filled = memory.fits and any(row.what == _CACHE for row in memory.rows)
        verdict = f"of {_gib(memory.capacity)}" + (": too much" if not memory.fits else _FILLED if filled else "")
        table.add_row(Text(memory.of, style or "bold"), Text(_gib(memory.total), style), Text(verdict, style))
        for row in memory.rows:
            table.add_row(f"  {row.what}", _gib(row.bytes), "")
    yield table
    if (cache := plan.cache) is not None:
        fixed = f" and {size(cache.bytes_per_sample)} a sample" if cache.bytes_per_sample else ""
        yield f"{_CACHE}: {size(cache.bytes_per_token)} a token{fixed} on each rank"
        yield (
            f"rollout: the cache has room for {cache.samples_longest:,} samples of maximum length, or "
            f"{cache.samples_mean:,} of mean length; {cache.at_once:,} of {cache.asked:,} requested samples are "
            "generated at a time"
        )
    if plan.sync is not None:
        yield f"sync: {size(plan.sync.bytes)}, {duration(plan.sync.seconds)}, {plan.sync.how}"
    saved = plan.checkpoint
    yield f"checkpoint: {size(saved.bytes)}, {duration(saved.seconds)}, {saved.how}"
    parts = ", ".join(f"{step.step} {duration(step.seconds)}" for step in plan.steps)
    side = ", rollout in parallel with the other steps" if plan.overlapped else ""
    yield f"an iteration: {duration(plan.seconds)}{side}: {parts}"
    each = f", {plan.tokens_per_second / plan.gpus:,.0f} for each GPU" if plan.gpus else ""
    yield f"throughput: {plan.tokens:,.0f} tokens an iteration, {plan.tokens_per_second:,.0f} a second{each}"
    if plan.run_seconds is not None:
        text = f"the run: {plan.iterations:,} iterations, {duration(plan.run_seconds)}"
        if plan.gpus:
            text += f", {plan.gpu_hours:,.0f} GPU-hours"
            money = _money(plan.gpu_hours, price)
            text += "; --price P adds what they cost" if money is None else f", price {money:,.0f}"
        yield f"{text}; evaluations are not counted"
    if not plan.gpus and plan.seconds > 3600:
        yield "no GPU is used: set training.num_gpus_per_rank and rollout.num_gpus_per_engine, which are 0"
    for problem in plan.problems:
        yield f"cannot run: {problem}"
    for memory in plan.memory:
        if not memory.fits:
            need = f"{_gib(memory.total)} of {_gib(memory.capacity)} GiB"
            yield f"does not fit: {memory.of} would need {need}"
    for remedy in plan.remedies:
        options = ", ".join(f"{name}: {str(value).lower()}" for name, value in remedy.options.items())
        yield f"{options} would fit: {_gib(remedy.highest)} of {_gib(remedy.capacity)} GiB of {remedy.of}"
    if not plan.fits and not plan.remedies:
        yield "no tried change of the options would fit: use more or larger GPUs, or a smaller model"
    yield "assumed: " + "; ".join(plan.assumptions)


def _machines(count: int) -> str:
    return f"{count} machine{'s' * (count > 1)}"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.3f}"


def _gib(count: float) -> str:
    return _short(count / 2**30)


def _short(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 else f"{amount:,.4f}"
