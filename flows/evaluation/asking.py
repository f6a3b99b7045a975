"""What a person, a schedule or a program asks for, as models and benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.configs.benchmark_files import load_benchmark
from cairn.configs.errors import ConfigError
from cairn.configs.schema.benchmark import Benchmark
from cairn.flows.evaluation.own import OwnBenchmark


def benchmarks_of(
    names: Sequence[str],
    *,
    n: int | None = None,
    data: Sequence[str] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    own: Mapping[str, OwnBenchmark] | None = None,
    seed: int | None = None,
) -> list[Benchmark | OwnBenchmark]:
    """Benchmarks by name or YAML file, in order.

    Args:
        n: responses to each question, in the place of the benchmark's own number.
        data: files with their rows: `FILE` for all, `NAME=FILE` for one of them.
        changes: values for other options, by section.
        own: benchmarks of the run that is evaluated, as they stand in its configuration: their names go first, and
            what is said here changes nothing of them.
        seed: of all draws, for who evaluates them; here it is refused where it would change nothing.

    Raises ConfigError, which lists every problem of a benchmark at once, and where what is said here would change no
    benchmark that is named.
    """
    files: dict[str | None, str] = {}
    for given in data:
        name, equals, file = given.partition("=")
        files[name if equals and name in names else None] = file if equals and name in names else given
    fixed = set(own or ()) & set(names)
    unheard = fixed & files.keys()
    if fixed >= set(names) and (n is not None or data or changes or seed is not None):
        unheard = fixed
    if unheard:
        raise ConfigError(
            [
                f"{name!r} is a benchmark of the run's own and evaluated as the run does, so its rows, options, number "
                "of responses and seed cannot be changed; another benchmark is a YAML file of your own"
                for name in sorted(filter(None, unheard))
            ]
        )
    found: list[Benchmark | OwnBenchmark] = []
    for name in names:
        if own is not None and name in own:
            found.append(own[name])
            continue
        sections = {section: dict(values) for section, values in (changes or {}).items()}
        if n is not None:
            sections.setdefault("sampling", {})["n"] = n
        file_of = files.get(name, files.get(None))
        if file_of is not None:
            sections.setdefault("source", {})["data"] = file_of
        found.append(load_benchmark(name, sections))
    twice = {one.name for one in found if [other.name for other in found].count(one.name) > 1}
    if twice:
        raise ConfigError([f"the benchmark {min(twice)!r} is asked for twice: name each once"])
    return found
