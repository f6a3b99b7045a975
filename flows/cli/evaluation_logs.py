"""Export results of evaluations as logs for the viewer of Inspect."""

from pathlib import Path
from typing import TYPE_CHECKING

from cairn.flows.cli.app import BadInput

if TYPE_CHECKING:
    from cairn.flows.evaluation.evaluating import Found
    from cairn.storage.store.store import Store


def require_exportable(export: tuple[str, Path] | None, results: int) -> None:
    """Check `--export` before anything is computed, and create the folder. Raises BadInput."""
    if export is None:
        return
    kind, path = export
    if kind != "inspect":
        raise BadInput(f"--export {kind} is not a format: use inspect, as in `--export inspect logs`")
    if path.suffix == ".eval" and results > 1:
        raise BadInput(f"{path} can contain only one log, but there are {results} results: use the name of a folder")
    if path.suffix != ".eval" and path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file, but not a log: use a folder, or a file name that ends in .eval")
    try:
        (path.parent if path.suffix == ".eval" else path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error}): use another path") from None


def write_log(store: "Store", found: "Found", path: Path) -> Path:
    """Write a result's log to `path`, or into it, and return its path. Raises BadInput where it cannot be written."""
    from cairn.flows.evaluation.inspect_log import export_inspect, log_name
    from cairn.storage.evals import read_samples

    file = path if path.suffix == ".eval" else path / log_name(found.result)
    try:
        export_inspect(found.result, read_samples(store, found.result), file, found.model)
    except OSError as error:
        raise BadInput(f"{file} cannot be written ({error}): use another path") from None
    return file
