r"""Data source of reasoning-gym's generated questions (Stojanovski et al. 2025, arXiv:2505.24760): over a hundred kinds
of puzzle, as many questions of each as needed, without a download. `pip install 'cairn-rl[reasoning-gym]'`.

`path` is a generator with options, or a YAML file with several by weight:

    chain_sum?size=2000&seed=1&max_terms=3        # the generator's own options as well as those below

    size: 2000                                    # puzzles.yaml
    seed: 1
    datasets:
      - {name: chain_sum, weight: 2, config: {max_terms: 3}}
      - {name: gcd, weight: 1, level: 2}

| option | default | |
|---|---|---|
| `size` | 1000 | questions |
| `seed` | 0 | of the generators |
| `level` | | of the generator's curriculum, from 0, in place of its default options |
| `part` | `all` | `heldout`: a tenth of the questions, selected by hash; `train`: the others. The two are disjoint |
| `answer` | `boxed` | where the answer is: in the last `\boxed{…}`, in `<answer>…</answer>` (`tag`), or the `whole` |
| `template` | `{question}` | the prompt |

A row has the generator's answer as label, and in its metadata what the grader `reasoning_gym` needs. Generators that
cannot be trained on are refused by name: those that give other questions in every Python process, and those whose own
scorer rejects their own answer or accepts any answer.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

import yaml

from cairn.configs.errors import BadData
from cairn.configs.yaml_file import parse_yaml
from cairn.tasks.data.files import open_file

ANSWERS = ("boxed", "tag", "whole")
PARTS = ("all", "train", "heldout")
_UNSEEDED = {"codeio", "list_functions"}
"""Generators that draw from other randomness than their seed. This set and the next were measured with 0.1.25: 25
questions each, in processes with PYTHONHASHSEED 0, 0, 1 and 2."""
_HASH_ORDERED = {
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
}
"""Generators whose questions depend on the order of sets."""

_NONSENSE = "#?"
"""Text that is the right answer to no question."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Options in `path`."""

    datasets: list[dict[str, Any]]
    """`name`, `weight` and `config` of each generator."""
    size: int = 1000
    seed: int = 0
    part: str = "all"
    answer: str = "boxed"
    template: str = "{question}"


def rows(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the questions as rows. Raises BadData where `path` does not describe what can be generated, see above."""
    plan = _plan(path)
    names = [one["name"] for one in plan.datasets]
    options = {one["name"]: _jsonable(one["config"]) for one in plan.datasets}
    entries, scorers = _generated(plan, path)
    for index in range(plan.size):
        entry = _jsonable(entries[index])
        if plan.part != "all" and (plan.part == "heldout") != _is_held_out(entry["question"]):
            continue
        name = names[0] if len(names) == 1 else entry["metadata"]["source_dataset"]
        for answer, right in ((entry["answer"], True), (_NONSENSE, False)):
            if _is_full_score(scorers[name], answer, entry) != right:
                what = "rejects the generator's own answer" if right else "accepts any answer"
                raise BadData(
                    f"{path}: the scorer of {name} {what} to question {index + 1}, so its rewards are useless: "
                    "choose another generator"
                )
        grading = {"generator": name, "config": options[name], "answer": plan.answer, "entry": entry}
        yield {
            "prompt": plan.template.replace("{question}", entry["question"]),
            "label": entry["answer"],
            "metadata": {"reasoning_gym": grading},
        }


def _generated(plan: _Plan, path: str) -> tuple[Any, dict[str, Any]]:
    """Return the generated questions by index, and the scorer of each generator. Raises BadData."""
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
    from reasoning_gym.factory import create_dataset

    try:
        if len(plan.datasets) == 1:
            one = plan.datasets[0]
            dataset = create_dataset(one["name"], **{"size": plan.size, "seed": plan.seed, **one["config"]})
            return dataset, {one["name"]: dataset.score_answer}
        specs = [DatasetSpec(one["name"], one["weight"], one["config"]) for one in plan.datasets]
        mixed = CompositeDataset(CompositeConfig(plan.size, plan.seed, specs))
        return mixed, {name: dataset.score_answer for name, dataset in mixed.datasets.items()}
    except (AssertionError, TypeError, ValueError) as error:  # its checks of options
        raise BadData(f"{path}: reasoning-gym refuses the options ({error}): correct them") from error


def _is_full_score(score: Any, answer: Any, entry: dict[str, Any]) -> bool:
    """Whether an answer gets the full score for a question after a round trip through JSON, as in the grader."""
    if not isinstance(answer, str):
        return False
    try:
        return float(score(answer=answer, entry=entry)) == 1.0
    # Each scorer fails in its own way on answers that it cannot parse.
    except Exception:
        return False


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % 10 == 0


def _plan(path: str) -> _Plan:
    try:
        import reasoning_gym  # noqa: F401
    except ModuleNotFoundError as error:
        raise BadData(
            f"the data source reasoning_gym needs the module {error.name!r}: pip install 'cairn-rl[reasoning-gym]'"
        ) from None
    wanted = _of_file(path) if path.endswith((".yaml", ".yml")) else _of_query(path)
    fields = {field.name for field in dataclasses.fields(_Plan)}
    if unknown := sorted(set(wanted) - fields):
        raise BadData(f"{path}: there is no option {unknown[0]!r}: use {', '.join(sorted(fields))}")
    plan = _Plan(**{**wanted, "datasets": _datasets(wanted.get("datasets"), path)})
    for name, value, known in (("part", plan.part, PARTS), ("answer", plan.answer, ANSWERS)):
        if value not in known:
            raise BadData(f"{path}: {name} is {value!r}: use one of {', '.join(known)}")
    if not isinstance(plan.size, int) or plan.size < 1 or not isinstance(plan.seed, int):
        raise BadData(f"{path}: size is {plan.size!r} and seed {plan.seed!r}: give whole numbers, a size of at least 1")
    if "{question}" not in str(plan.template):
        raise BadData(
            f"{path}: template {plan.template!r} has no {{question}} in it: write it where the question belongs"
        )
    return plan


def _of_query(path: str) -> dict[str, Any]:
    """Parse `name?option=value&…`. An option that is not one of the source's is passed to the generator."""
    name, _, query = path.partition("?")
    values = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    own = {field.name for field in dataclasses.fields(_Plan)} - {"datasets"}
    config = {key: value for key, value in values.items() if key not in own and key != "level"}
    level = {"level": values["level"]} if "level" in values else {}
    return {**{key: values[key] for key in own & set(values)}, "datasets": [{"name": name, "config": config, **level}]}


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def _of_file(path: str) -> dict[str, Any]:
    with open_file(path, (".yaml", ".yml")) as file:
        try:
            values = parse_yaml(file.read().decode())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadData(f"{path} is not YAML ({error}): correct it") from None
    if not isinstance(values, dict):
        raise BadData(f"{path} does not hold options: it should have `datasets:` with a list of generators")
    return values


def _datasets(requested: Any, path: str) -> list[dict[str, Any]]:
    """Return the requested generators, each with name, weight and config. Raises BadData."""
    from reasoning_gym.factory import DATASETS

    known = sorted(DATASETS.keys() - {"composite"})
    if not isinstance(requested, list) or not requested or not all(isinstance(one, dict) for one in requested):
        raise BadData(f"{path}: datasets is not a list of generators: write `- {{name: chain_sum, weight: 1}}`")
    generators = []
    for one in requested:
        if unknown := sorted(set(one) - {"name", "weight", "config", "level"}):
            raise BadData(f"{path}: a generator has no option {unknown[0]!r}: use name, weight, config, level")
        name, weight, config = one.get("name"), one.get("weight", 1), one.get("config") or {}
        if name not in known:
            raise BadData(f"{path}: reasoning-gym has no generator {name!r}: {_near(str(name), known)}")
        if name in _UNSEEDED:
            raise BadData(
                f"{path}: {name} gives other questions every time, even with a seed: choose another generator"
            )
        if name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdecimal():
            raise BadData(
                f"{path}: {name} gives other questions in every Python process: set PYTHONHASHSEED=0 in the "
                "environment of the process that starts the run, or choose another generator"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
            raise BadData(f"{path}: the weight of {name} is {weight!r}: give a number above 0")
        if "level" in one:
            config = {**_at_level(name, one["level"], path), **config}
        generators.append({"name": name, "weight": weight, "config": config})
    if len({one["name"] for one in generators}) < len(generators):
        raise BadData(f"{path}: a generator is named twice: put the options of one into a source of its own")
    return generators


def _near(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"


def _at_level(name: str, level: Any, path: str) -> dict[str, Any]:
    """Return the options of a generator at a level of its curriculum. Attributes with fewer levels are at their
    last."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise BadData(f"{path}: {name} has no curriculum: leave level out")
    if isinstance(level, bool) or not isinstance(level, int) or level < 0:
        raise BadData(f"{path}: level is {level!r}: give a whole number from 0")
    curriculum = create_curriculum(name)
    curriculum.set_global_level(level)
    config = dataclasses.asdict(curriculum.generate_configuration())
    return {key: value for key, value in config.items() if key not in ("seed", "size")}


def _jsonable(config: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
    return values
