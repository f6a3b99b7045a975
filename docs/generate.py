"""Write the generated pages of docs/, and the generated sections of others, see `PAGES`: `python docs/generate.py`."""

import json
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cairn.configs.catalogue import benchmark_names, load_benchmark
from cairn.configs.counterparts import Counterpart, Table, counterparts
from cairn.configs.loader import LIST_ITEM, Option, load, options
from cairn.configs.schema.evaluation import Benchmark
from cairn.configs.schema.run import RunConfig
from cairn.configs.yaml_file import parse_yaml
from cairn.engines.processes.libraries import Variable
from cairn.engines.processes.libraries import table as library_variables
from cairn.flows.plan.planning import plan_recipe
from cairn.flows.reading.metrics import METRICS
from cairn.storage.query.views import VIEWS

DOCS = Path(__file__).parent
GENERATED = "<!-- Written by docs/generate.py; change the code, not this file. -->"


def configuration() -> str:
    """Every option of a recipe, by section."""
    intro = f"""\
# Configuration

{GENERATED}

This page lists every option of a run. A recipe is a YAML file with these options; `configs/recipes/` has some.

```
cairn validate RECIPE                             # checks the recipe and prints it with all defaults
cairn train RECIPE --set training.lr=1e-5         # changes an option; the value is YAML
cairn train RECIPE --set eval.benchmarks.0.path=test.jsonl
```

An option that is not in these tables is an error. An option that has no effect, because of others, is left out with a
warning. Relative paths start from the working directory.

A recipe may begin with `base: other.yaml`, another recipe, relative to its own folder. Its sections and mappings
override those of the base option by option; its lists replace those of the base. The recipes in
`configs/recipes/models/` [have bases](recipes.md).

The configuration is frozen in the ledger when the run is created.
"""
    parts = [intro]
    sections: dict[str, list[Option]] = {}
    for option in options(RunConfig):
        sections.setdefault(option.name.rpartition(".")[0], []).append(option)
    for name, section in sections.items():
        title = f"`{name.replace('.' + LIST_ITEM, '[]')}`" if name else "Top level"
        about = " ".join((section[0].section.__doc__ or "").split())
        rows = [[f"`{o.name.rpartition('.')[2]}`", o.values, _default(o), o.description] for o in section]
        parts.append(f"## {title}\n\n{about}\n\n{_table(['option', 'values', 'default', 'meaning'], rows)}")
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of a run."""
    intro = f"""\
# Metrics

{GENERATED}

This page lists every metric of a run.

```
tensorboard --logdir tensorboard
```

shows them. Event files are in `tracking.tensorboard_dir`, one folder for each run; [tracking](tracking.md) describes
other trackers.

Every step writes its numbers into its commit. TensorBoard and `cairn status` show the commits, so a run that was killed
and resumed shows every iteration once. Names are slime's where slime has the metric.

The step of a point is its iteration, counted from 0. The step of an evaluation (`eval/`) is the number of iterations
that the weights were trained for: 0 is the initial weights.

In `train/`, a mean of tokens is the mean over samples of the mean over a sample's trained tokens. With
`algorithm.calculate_per_token_loss` it is the mean over all trained tokens. Age and the sample filter may leave a
sample without a trained token; it counts as 0 in the former mean, as in slime. So the ratio `train/ois`
may fall below 1.

| *source* | the value comes from |
| --- | --- |
| a step | its commit; counts of several shards are added |
| timings | start and commit times of the iteration's steps, without the time in which no driver was alive |
| outputs | the sizes of their files |
| waits | timings of this iteration and earlier ones, since with `rollout.pipeline: lagged` one side works on an \
iteration while the other works on an earlier one; shown by trackers |
"""
    rows = [[f"`{metric.name}`", metric.unit or "–", metric.source, metric.meaning] for metric in METRICS]
    return f"{intro}\n{_table(['metric', 'unit', 'source', 'meaning'], rows)}"


def views() -> str:
    """Every view of the ledger and its columns."""
    intro = f"""\
# Views of the ledger

{GENERATED}

This page lists the views and columns that [`cairn sql`](sql.md) and `cairn.open(…).sql` query.

```
cairn sql --schema            # prints the same
cairn sql --schema --json     # for programs
```

Types are DuckDB's. Times are in UTC, durations in seconds.
"""
    parts = [intro]
    for view in VIEWS.values():
        rows = [[f"`{name}`", column.type, column.about] for name, column in view.columns.items()]
        table = _table(["column", "type", "meaning"], rows)
        parts.append(f"## `{view.name}`\n\nA row is {view.about}.\n\n{table}")
    return "\n".join(parts)


def recovery() -> str:
    """The page with the tally of random kills as it is now; the rest is written by hand."""
    tally = runpy.run_path(str(DOCS.parent / "tests" / "chaos" / "tally.py"), run_name="tally")
    page = (DOCS / "recovery.md").read_text(encoding="utf-8")
    before, rest = page.split(tally["BEGIN"])
    return before + tally["section"](tally["read"]()) + rest.split(tally["END"])[1]


def benchmarks() -> str:
    """The page with the table of benchmarks and their options; the rest is written by hand."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for name, made in (("table", _benchmark_table()), ("options", _benchmark_options())):
        begin = f"<!-- {name.capitalize()}: written by docs/generate.py; change the code, not these lines. -->\n"
        end = f"<!-- End of the {name}. -->\n"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return page


def _benchmark_table() -> str:
    answers = parse_yaml(
        (DOCS.parent / "tests/tasks/evaluation/benchmarks/parity/answers.yaml").read_text(encoding="utf-8")
    )
    rows = []
    for benchmark in map(load_benchmark, benchmark_names()):
        follows, prompt, sampling = benchmark.follows, benchmark.prompt, benchmark.sampling
        task = "" if follows is None else follows.task
        held = answers.get("aime24" if task == "aime25" else task, [])
        others = sum("differs" in answer for answer in held)
        drawn = "greedy" if sampling.temperature == 0 else f"{sampling.n} at {sampling.temperature:g}"
        rows.append(
            [
                f"`{benchmark.name}`",
                str(benchmark.rows or "–"),
                prompt.style + (f", {len(prompt.examples)} examples" if prompt.examples else ""),
                f"{drawn}, {sampling.max_tokens} tokens",
                f"`{benchmark.grader.name}`",
                f"`{task}` {follows.version}" if follows else "–",
                (follows.differs or "–") if follows else "–",
                f"{len(held)}, {others} differ" if held else "–",
            ]
        )
    return _table(["benchmark", "rows", "prompt", "samples", "grader", "follows", "differences", "held to"], rows)


def _benchmark_options() -> str:
    rows = [[f"`{o.name}`", o.values, _default(o), o.description] for o in options(Benchmark)]
    return _table(["option", "values", "default", "meaning"], rows)


def coming_from_slime() -> str:
    """The page with a table of slime's flags for each group of them; the rest is written by hand."""
    return _with_counterparts((DOCS / "coming-from-slime.md").read_text(encoding="utf-8"), "slime")


def importing() -> str:
    """The page with tables of the options of Megatron, verl and TRL; the rest is written by hand."""
    page = (DOCS / "importing.md").read_text(encoding="utf-8")
    for table in ("megatron", "verl", "trl"):
        page = _with_counterparts(page, table)
    return page


def _with_counterparts(page: str, table: Table) -> str:
    name = f"configs/{table}.yaml"
    begin = f"<!-- {table}: written by docs/generate.py from {name}; change that, not these lines. -->\n"
    end = f"<!-- End of {table}. -->\n"
    before, rest = page.split(begin)
    groups: dict[str, dict[str, list[str]]] = {}
    for flag in counterparts(table).values():
        groups.setdefault(flag.group, {}).setdefault(_here(flag), []).append(f"`{flag.flag}`")
    tables = [
        f"### {group}\n\n{_table([table, 'here'], [[', '.join(flags), here] for here, flags in rows.items()])}"
        for group, rows in groups.items()
    ]
    return before + begin + "\n" + "\n".join(tables) + "\n" + end + rest.split(end)[1]


def recipes() -> str:
    """The page with the table of the recipes of published models; the rest is written by hand."""
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    begin = "<!-- Recipes: written by docs/generate.py from configs/recipes; change those, not these lines. -->\n"
    end = "<!-- End of the recipes. -->\n"
    before, rest = page.split(begin)
    files = sorted((DOCS.parent / "configs" / "recipes" / "models").glob("*.yaml"), key=lambda file: file.stem.lower())
    head = ["model", "on 8 ×", "training", "rollout engines", "samples", "response", "optimizer", "figures from"]
    needs = ["model", "GPUs", "GPU that trains, GiB", "machine, GiB", "tokens/s", "tokens/s a GPU", "slime"]
    tables = [_table(head, [_recipe(file) for file in files]), _table(needs, [_needs(file) for file in files])]
    return before + begin + "\n" + "\n".join(tables) + "\n" + end + rest.split(end)[1]


SLIME_SCRIPTS = DOCS.parent / "configs" / "slime_scripts.yaml"
"""Needs of slime's scripts, beside which the recipes of published models stand: `gpus` of training and rollout engines
together, their type `gpu`, and whether the optimizer is in the host's memory, `offload`."""


def slime_script(recipe: Path) -> tuple[str, dict[str, Any]] | None:
    """The script that a recipe's head names, and its needs; None where the head names none."""
    named = re.search(r"scripts/([\w.-]+)\.sh", recipe.read_text("utf-8").partition("\n\n")[0])
    if named is None:
        return None
    return named[1], {"gpu": "h100", **parse_yaml(SLIME_SCRIPTS.read_text("utf-8"))[named[1]]}


def _needs(file: Path) -> list[str]:
    """What `cairn plan` says of a recipe, beside the GPUs of slime's script."""
    config = load(file)
    assert config.fleet.gpu is not None
    plan = plan_recipe(config, file.stem, config.fleet.gpu, memory_of_this_machine=0)
    assert plan.fits, file
    trains, host = plan.memory[0], plan.memory[-1]
    found = slime_script(file)
    needs = found[1] if found else {}
    slime = f"{needs['gpus']} {needs['gpu']}{', optimizer on the host' * needs['offload']}" if found else "–"
    return [
        f"`{file.stem}`",
        f"{plan.gpus:g} {plan.gpu}",
        f"{trains.total / 2**30:.0f} of {trains.capacity / 2**30:.0f}",
        f"{host.total / 2**30:,.0f} of {host.capacity / 2**30:,.0f}",
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.tokens_per_second / plan.gpus:,.0f}",
        slime,
    ]


def _recipe(file: Path) -> list[str]:
    config = load(file)
    training, rollout, steps = config.training, config.rollout, config.training.num_steps_per_rollout
    about = " ".join(line.removeprefix("# ") for line in file.read_text("utf-8").partition("\n\n")[0].splitlines())
    machines, gpu, after = re.findall(r" on (?:(\d+) machines of )?8 × (\w+ \d+ GB).* After (.*)\.", about)[0]
    sizes = {
        "TP": training.tensor_model_parallel_size,
        "PP": training.pipeline_model_parallel_size,
        "CP": training.ranks_of_sequence,
        "EP": training.megatron.get("expert_model_parallel_size", 1),
        "DP": training.data_parallel_size,
    }
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    where = "" if config.fleet.colocate else f"{training.world_size} GPUs: "
    return [
        f"`{file.stem}`",
        f"{gpu}, {machines or 1}",
        f"{where}{layout}",
        f"{rollout.num_engines} × {rollout.num_gpus_per_engine:g} GPUs",
        f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt}",
        f"{rollout.rollout_max_response_len:,}",
        f"{config.algorithm.advantage_estimator}, {'1 step' if steps == 1 else f'{steps} steps'}",
        after if after in {other.stem for other in file.parent.glob("*.yaml")} else after.replace("slime's ", ""),
    ]


def libraries() -> str:
    """Every environment variable that libraries need; the rest is written by hand."""
    page = (DOCS / "libraries.md").read_text(encoding="utf-8")
    begin = "<!-- Variables: written by docs/generate.py from configs/gpus.yaml; change that, not these lines. -->\n"
    end = "<!-- End of the variables. -->\n"
    before, rest = page.split(begin)
    tables = []
    for kind, title in (("trainer", "Training ranks"), ("sglang", "Servers of SGLang")):
        rows = [
            [f"`{row.variable}`", _set_to(row), row.why, row.source]
            for row in library_variables()
            if kind in row.processes
        ]
        tables.append(f"## {title}\n\n{_table(['variable', 'value', 'why', 'source'], rows)}")
    return before + begin + "\n" + "\n".join(tables) + "\n" + end + rest.split(end)[1]


def _set_to(row: Variable) -> str:
    value = "removed" if row.value is None else f"`{row.value}`"
    needed = [f"`training.{option}: {str(wanted).lower()}`" for option, wanted in row.when.items()]
    return ", ".join([value, *(["fixed"] if row.fixed else []), *(f"with {one}" for one in needed)])


def _here(flag: Counterpart) -> str:
    options = " and ".join(f"`{name.replace(f'.{LIST_ITEM}', '[]')}`" for name in flag.options)
    return f"– {flag.why}" if flag.why else "; ".join(filter(None, [options, flag.how]))


PAGES: dict[str, Callable[[], str]] = {
    "benchmarks.md": benchmarks,
    "coming-from-slime.md": coming_from_slime,
    "configuration.md": configuration,
    "importing.md": importing,
    "libraries.md": libraries,
    "metrics.md": metrics,
    "recipes.md": recipes,
    "views.md": views,
    "recovery.md": recovery,
}


def _default(option: Option) -> str:
    if option.required:
        return "required"
    if (least := re.search(r"≥ (\d+)$", option.values)) and option.default == 0 < int(least[1]):
        return "–"  # a default out of bounds stands for none
    return f"`{json.dumps(option.default, ensure_ascii=False, default=_given)}`"


def _given(section: BaseModel) -> dict[str, Any]:
    """What a section in a list says itself."""
    return section.model_dump(mode="json", exclude_unset=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
