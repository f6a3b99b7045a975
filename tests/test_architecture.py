"""The graph of imports, drawn from the sources, has one direction: no circle of files, and none of folders.

Every import counts: at the top of a module, within a function, and for type checkers alone.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("configs", "storage", "engines", "tasks", "flows")
"""From the lowest to the highest."""

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Files by the names that they are imported under."""
    files = {file.relative_to(ROOT).with_suffix(""): file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")}
    return {"cairn." + ".".join(name.parts).removesuffix(".__init__"): file for name, file in files.items()}


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            for name in node.names:
                yield from {f"{node.module}.{name.name}", str(node.module)} & known.keys()


def graph() -> Graph:
    """Modules with those that each imports. Of a package and a module in it, the module counts."""
    known = modules()
    found = {}
    for module, file in known.items():
        names = set(imported(file, known)) - {module}
        found[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return found


def folders(files: Graph) -> Graph:
    """At every level, the siblings that import each other: `cairn.tasks.data` and `cairn.tasks.durable`, for one."""
    found: dict[str, set[str]] = defaultdict(set)
    for importer, names in files.items():
        for name in names:
            one, other = importer.split("."), name.split(".")
            common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if common is not None:
                found[".".join(one[: common + 1])].add(".".join(other[: common + 1]))
    return found


def circle(found: Graph) -> list[str] | None:
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # in the direction of the imports
    return None


def test_no_circle_of_files_or_folders() -> None:
    files = graph()
    assert len(files) > 400
    assert circle(files) is None
    assert circle(folders(files)) is None


def test_layers_import_downwards_alone() -> None:
    upward = {
        (importer, name)
        for importer, names in graph().items()
        for name in names
        if LAYERS.index(name.split(".")[1]) > LAYERS.index(importer.split(".")[1])
    }
    assert upward == set()


def test_engines_know_neither_prefect_nor_the_ledger_and_only_the_fleet_knows_ray() -> None:
    wrong = []
    for file in (ROOT / "engines").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_ray = name.partition(".")[0] == "ray" and "fleet" not in file.relative_to(ROOT).parts
                is_ledger = name.startswith(("cairn.storage.ledger", "cairn.storage.logs", "cairn.storage.query"))
                if is_ray or is_ledger or name.partition(".")[0] == "prefect":
                    wrong.append((str(file.relative_to(ROOT)), name))
    assert wrong == []


def test_a_folder_says_in_one_sentence_what_it_is_for() -> None:
    silent = []
    for layer in LAYERS:
        for folder in {file.parent for file in (ROOT / layer).rglob("*.py")}:
            package = folder / "__init__.py"
            if not {"cpu", "plugin"} & set(folder.parts) and not (
                package.exists() and ast.get_docstring(ast.parse(package.read_text()))
            ):
                silent.append(str(folder.relative_to(ROOT)))
    assert silent == []
