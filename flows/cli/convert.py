"""The command that turns checkpoints into model folders and back: convert."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from cairn.flows.cli.app import BadInput, tell, writing


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A model folder in Hugging Face format, or a checkpoint of Megatron's."),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write; it must not exist.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="For a checkpoint: the model folder that its training began with.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="training.dtype of the run: float32 or bfloat16.")] = "float32",
) -> None:
    """Convert between model folders in Hugging Face format and checkpoints of the Megatron engine.

    A model folder becomes a training state before its first update; a checkpoint, of any layout of ranks, optimizer
    and algorithm, becomes a model folder of the actor's weights. So does one that Megatron-LM or slime wrote in the
    format torch_dist, of which no pickle is opened. Every file of ours is checked by its SHA-256. One process does it,
    on a GPU where there is one: it holds 16 bytes a parameter to make a checkpoint, and the weights alone to read one.

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
    from cairn.storage.store import open_store

    if target.exists():
        raise BadInput(f"{target} is there already: give the name of a folder to be made")
    if not source.is_dir():
        raise BadInput(f"{source} is not a folder")
    from_model = (source / "config.json").is_file()
    if not from_model and model is None:
        raise BadInput(f"{source} is a checkpoint: give --model, the model folder that its run began with")
    if dtype not in ("float32", "bfloat16"):
        raise BadInput(f"--dtype is {dtype}; it is float32 or bfloat16")
    # Of packages that it can do without, and of how it uses PyTorch: nobody who converts can mend that.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    # What makes Megatron run on the CPU refuses to be installed where there is a GPU.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend_for(device)  # prepares megatron-core before anything imports it
    with writing(target):
        if model is not None and not from_model:
            from cairn.engines.training.megatron.convert import export_checkpoint, export_torch_dist
            from cairn.engines.training.megatron.torch_dist import find_torch_dist

            if (source / "megatron_state.json").is_file() or (theirs := find_torch_dist(source)) is None:
                export_checkpoint(
                    open_store(str(source.parent)), source.name, model, target, dtype=dtype, device=device
                )
            else:
                export_torch_dist(theirs, model, target, dtype=dtype, device=device)
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
    tell(f"{target}: {'a checkpoint' if from_model else 'a model folder'} of {source}")
