"""The command that takes a model, or samples, out of a run: export."""

import re
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.flows.cli.app import BadInput, JsonOption, StoreOption, print_json, say, tell, writing
from cairn.flows.cli.reading import open_ledger

if TYPE_CHECKING:
    from cairn.flows.events import Event
    from cairn.storage.ledger import Ledger


class Format(StrEnum):
    """What is written."""

    HF = "hf"
    """A model folder."""
    ATIF = "atif"
    """An iteration's samples."""


_PLACE = re.compile(r"(?P<run>[^@]+)(?:@(?P<iteration>\d{1,6}))?")


def export(
    place: Annotated[
        str, typer.Argument(metavar="RUN[@ITER]", help="A run, and the iteration whose weights; the newest by default.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write: new, or empty.")],
    format: Annotated[
        Format,
        typer.Option("--format", help="hf: a model folder; atif: the iteration's samples, a JSON file a trajectory."),
    ] = Format.HF,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, in peft's format, and not merged.")
    ] = False,
    json: JsonOption = False,
    store: StoreOption = ".",
) -> None:
    """Write a run's weights as a model folder in Hugging Face format, with tokenizer and a card that says whence. With
    `--format atif` an iteration's samples, in the Agent Trajectory Interchange Format 1.8.

    Takes weights from the iteration's checkpoint. Where there is none the run's engines are started apart, go to the
    newest checkpoint before it, and replay the committed train steps after that. What was written is held against
    the digest in the ledger. Nothing is written into the ledger, and a live driver of the run is not disturbed.

    Examples:

    - `cairn export quickstart sorter` the newest weights
    - `cairn export quickstart@19 sorter-20`
    - `cairn export agent@3 trajectories --format atif` what its samples went through, with tokens and log-probs
    - `cairn export tuned adapter --adapter` what `training.lora` trained, for peft
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        raise BadInput(f"{place!r} is not RUN or RUN@ITER, such as quickstart@19")
    ledger = open_ledger(store, match["run"])
    iteration = None if match["iteration"] is None else int(match["iteration"])
    if format is Format.ATIF:
        if adapter:
            raise BadInput("--adapter is of a model: leave it out, or --format atif")
        _export_atif(ledger, folder, iteration, json)
        return
    # Of packages that it can do without, and of how it uses PyTorch: nobody who exports can mend that.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    from cairn.flows.export.model import CannotExport
    from cairn.flows.export.model import export as exported_to
    from cairn.tasks.events import Message

    def on_event(event: "Event") -> None:
        if isinstance(event, Message):
            tell(event.text)

    try:
        with writing(folder):
            exported = exported_to(ledger, folder, iteration, adapter=adapter, emit=on_event)
    except CannotExport as error:
        raise BadInput(str(error)) from None
    if json:
        print_json({"folder": str(folder), **exported.model_dump(mode="json")})
        return
    kind = "adapter" if exported.adapter else "model"
    say(f"{folder}: the {kind} of {exported.run} after iteration {exported.iteration}")
    say(f"  weight version {exported.weight_version}, {exported.parameters:,} parameters in {exported.dtype}")
    say(f"  digest of its tensors: {exported.tensors}")
    if exported.published is not None:
        say(f"  equal to what the run's sync step committed: {exported.published}")


def _export_atif(ledger: "Ledger", folder: Path, iteration: int | None, json: bool) -> None:
    from cairn.flows.export.atif import export_atif

    try:
        with writing(folder):
            written = export_atif(ledger, folder, iteration)
    except (LookupError, FileExistsError) as error:
        raise BadInput(str(error)) from None
    if json:
        print_json({"folder": str(folder), **written.model_dump(mode="json")})
        return
    say(
        f"{folder}: {written.files} trajectories of {written.samples} samples, run {written.run}, "
        f"iteration {written.iteration}"
    )
