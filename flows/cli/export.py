"""Commands that take something out of a run: export, bundle. Also convert, for checkpoints, and unbundle."""

import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import (
    IterationArgument,
    Root,
    SampleArgument,
    Shown,
    SignersOption,
    bad_input,
    read_signers_of,
    writing,
)
from cairn.flows.cli.printing import print_message
from cairn.flows.reading.address import samples_of, the_sample

if TYPE_CHECKING:
    from cairn.flows.export.unbundle import Checked
    from cairn.storage.ledger.ledger import Ledger


class Format(StrEnum):
    """Format of an export."""

    HF = "hf"
    """A model folder."""
    ATIF = "atif"
    """An iteration's samples."""


def export(
    root: Root,
    place: IterationArgument,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The folder to write: new, or empty.")],
    format: Annotated[
        Format,
        Option("--format", help="hf: a model folder; atif: the iteration's samples, one JSON file per trajectory."),
    ] = Format.HF,
    adapter: Annotated[bool, Option("--adapter", help="Only the LoRA adapter, in peft's format, not merged.")] = False,
) -> Shown:
    """Write a run's weights as a model folder, or its samples.

    The folder has Hugging Face's format. A model folder contains the tokenizer, and a card that names the weights'
    origin. With `--format atif` the command writes an iteration's samples, in the Agent Trajectory Interchange Format
    1.8.

    The weights come from the iteration's checkpoint. If there is none, the command starts engines like the run's, loads
    the newest checkpoint before the iteration, and replays the committed train steps after it. The written weights are
    compared with the digest in the ledger. Nothing is written into the ledger, and a live driver of the run is not
    disturbed.

    Examples:

    - `cairn export quickstart sorter` the newest weights
    - `cairn export quickstart@19 sorter-20`
    - `cairn export agent@3 trajectories --format atif` what its samples went through, with tokens and log-probs
    - `cairn export tuned adapter --adapter` what `training.lora` trained, for peft
    """
    ledger, iteration = root.ledger(place.run), place.iteration
    if format is Format.ATIF:
        if adapter:
            raise BadInput("--adapter needs a model: leave out --adapter or --format atif")
        return _export_atif(ledger, folder, iteration)
    # Warnings of Megatron about optional packages, and about its use of PyTorch: the user cannot fix these.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    from cairn.flows.export.model import export as exported_to

    with writing(folder):
        exported = exported_to(ledger, folder, iteration, adapter=adapter, emit=print_message)
    kind = "adapter" if exported.adapter else "model"
    text = [
        f"{folder}: the {kind} of {exported.run} after iteration {exported.iteration}",
        f"  weight version {exported.weight_version}, {exported.parameters:,} parameters in {exported.dtype}",
        f"  digest of its tensors: {exported.tensors}",
    ]
    if exported.published is not None:
        text.append(f"  equal to what the run's sync step committed: {exported.published}")
    return Shown({"folder": str(folder), **exported.model_dump(mode="json")}, text)


def _export_atif(ledger: "Ledger", folder: Path, iteration: int | None) -> Shown:
    from cairn.flows.export.atif import export_atif

    with bad_input(LookupError, FileExistsError), writing(folder):
        written = export_atif(ledger, folder, iteration)
    text = f"{written.files} trajectories of {written.samples} samples, run {written.run}"
    return Shown(
        {"folder": str(folder), **written.model_dump(mode="json")},
        f"{folder}: {text}, iteration {written.iteration}",
    )


def convert(
    source: Annotated[
        Path, Argument(metavar="SOURCE", help="A model folder in Hugging Face format, or a Megatron checkpoint.")
    ],
    target: Annotated[Path, Argument(metavar="TARGET", help="The folder to write; it must not exist.")],
    model: Annotated[
        Path | None, Option("--model", help="For a checkpoint: the model folder that its training started from.")
    ] = None,
    dtype: Annotated[str, Option("--dtype", help="training.dtype of the run: float32 or bfloat16.")] = "float32",
) -> Shown:
    """Convert between model folders and Megatron checkpoints.

    A model folder becomes a training state before its first update. A checkpoint, of any layout of ranks, optimizer and
    algorithm, becomes a model folder with the actor's weights. So does a checkpoint that Megatron-LM or slime wrote in
    the format torch_dist; its pickles are never opened. Every file of Cairn's own checkpoints is checked by its
    SHA-256. One process converts, on a GPU if there is one. It holds 16 bytes a parameter to make a checkpoint, and
    only the weights to read one.

    Examples:

    - `cairn convert runs/math/iterations/000009/checkpoint/ATTEMPT out --model models/qwen3`
    - `cairn convert slime/checkpoints out --model models/qwen3 --dtype bfloat16`
    - `cairn convert models/qwen3 out`
    """
    import torch

    from cairn.configs.schema.algorithm import AlgorithmConfig
    from cairn.configs.schema.run import ModelConfig
    from cairn.configs.schema.training import TrainingConfig
    from cairn.engines.training.factory import make_engine
    from cairn.engines.training.megatron.backend import backend_for
    from cairn.storage.opening import open_store

    if target.exists():
        raise BadInput(f"{target} exists already: use the name of a new folder")
    if not source.is_dir():
        raise BadInput(f"{source} is not a folder")
    from_model = (source / "config.json").is_file()
    if not from_model and model is None:
        raise BadInput(f"{source} is a checkpoint: set --model to the model folder that its run started from")
    if dtype not in ("float32", "bfloat16"):
        raise BadInput(f"--dtype is {dtype}; use float32 or bfloat16")
    # Warnings of Megatron about optional packages, and about its use of PyTorch: the user cannot fix these.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    # The patch that lets Megatron run on the CPU refuses to be installed where there is a GPU.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend_for(device)  # prepares megatron-core before anything imports it
    with writing(target):
        if model is not None and not from_model:
            from cairn.engines.training.megatron.convert import export_checkpoint, export_torch_dist, find_torch_dist

            if (source / "megatron_state.json").is_file() or (torch_dist := find_torch_dist(source)) is None:
                export_checkpoint(
                    open_store(str(source.parent)), source.name, model, target, dtype=dtype, device=device
                )
            else:
                export_torch_dist(torch_dist, model, target, dtype=dtype, device=device)
        else:
            engine = make_engine(
                ModelConfig(path=str(source)),
                TrainingConfig.model_validate({"engine": "megatron", "dtype": dtype}),
                AlgorithmConfig(),
                temperature=1.0,
                total_steps=1,
                device=str(device),
            )
            engine.save(open_store(str(target.parent)), target.name)
    kind = "a checkpoint" if from_model else "a model folder"
    return Shown({"target": str(target), "kind": kind, "source": str(source)}, f"{target}: {kind} of {source}")


def bundle(
    root: Root,
    place: SampleArgument,
    file: Annotated[Path, Argument(metavar="FILE", help="The zip file to write; must not exist yet.")],
    weights: Annotated[
        bool, Option("--weights", help="Add the newest checkpoint up to the weights that sampled it.")
    ] = False,
) -> Shown:
    """Write one sample's full history into a file.

    The file can be read and checked without the store. It contains the sample's prompt, response, tokens and log-probs,
    its grade, its advantage, the update that consumed it, and the source of a user's grader. It also contains the chain
    of commits back to the first, byte for byte, with their signatures. `cairn unbundle` checks all of it without the
    store. The tables of the sample's shard are complete, so the file contains the other samples in them too.

    Examples:

    - `cairn bundle quickstart@39/17 sample.zip`
    """
    from cairn.flows.export.bundle import bundle as bundled

    ledger = root.ledger(place.run)
    iteration, found = samples_of(ledger, place)
    sample = the_sample(place, found, iteration).number
    try:
        contents = bundled(ledger, iteration, sample, file, weights=weights)
    except FileExistsError:
        raise BadInput(f"{file} exists already: use another name") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be written: {error.strerror}") from None
    text = [f"{file}: sample {sample} of iteration {iteration} of run {place.run}, up to {contents.newest}"]
    if weights:
        saved = contents.checkpoint
        text.append(f"with the weights of {saved}" if saved else "without weights: there is no checkpoint")
    return Shown(contents, [*text, f"check it with: cairn unbundle {file}"])


def unbundle(
    file: Annotated[Path, Argument(metavar="FILE", help="The file that `cairn bundle` wrote.")],
    signers: SignersOption = None,
    trust_code: Annotated[bool, Option("--trust-code", help="Run the grader's source that is in the bundle.")] = False,
) -> Shown:
    """Check a bundle, and grade its sample again.

    The store is not needed. Exits with 1 if anything is wrong. The command checks all digests, the chain of commits
    back to the first, and the signatures if signers are given. It also checks that the same version of the grader
    returns the recorded reward. It does not repeat generation and training. A consistent bundle may still be made up as
    a whole: compare the digest of its newest commit, or give signers.

    Examples:

    - `cairn unbundle sample.zip`
    - `cairn unbundle sample.zip --signers team.txt --json`
    """
    from cairn.flows.export.unbundle import check

    names = read_signers_of(signers)
    try:
        checked = check(file, signers=names, trust_code=trust_code)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None
    return Shown(checked, _checked(checked), failed=bool(checked.problems))


def _checked(checked: "Checked") -> Iterator[str]:
    contents = checked.contents
    yield from checked.problems
    sample = f"sample {contents.sample_index} of group {contents.group_id}"
    yield f"{sample}, iteration {contents.iteration} of run {contents.run}, up to {contents.newest}"
    yield f"prompt    {checked.prompt}"
    yield f"response  {checked.response}"
    why = checked.not_graded
    verdict = f"not graded again: {why}" if why else f"graded again: {checked.graded_again}"
    yield f"reward    {checked.reward}, {verdict}"
    summary = f"{len(checked.problems)} problems" if checked.problems else "all of it is what was committed"
    yield f"{checked.commits} commits, {checked.tables} tables and checkpoint files read; {summary}"
    yield f"digest of {contents.newest}: {contents.newest_digest}"
