"""Naming of the colour of dots: `python -m examples.dots.build`.

build/dots/
    train.parquet          a question with a picture each, the picture as bytes in the column `images`
    heldout.jsonl          others, with paths of pictures
    heldout/               those pictures, which are not trained on
    demonstrations.jsonl   of the warm start: the question without a picture
    untrained/             the model before its warm start, its tokenizer and its image processor
    runs/warm-start/       the ledger of the warm start
    model/                 the warm-started model
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.building import build_by_command, write_rows
from examples.dots.task import QUESTION, demonstration, picture

FOLDER = Path("build/dots")
TRAIN_ROWS = 2048
HELD_OUT_ROWS = 128

STEPS = 60
"""Optimizer steps of the warm start."""


def main() -> None:
    """Command line."""
    build_by_command("the model of the dots", FOLDER, build)


def build(folder: Path, seed: int) -> None:
    """Write the folder."""
    from examples.quickstart.warm_start import BATCH, warm_start, write_model

    begin(folder, seed, BATCH * STEPS)
    warm_start(folder, STEPS)
    write_model(folder)


def begin(folder: Path, seed: int, shown: int, train: int = TRAIN_ROWS, held_out: int = HELD_OUT_ROWS) -> None:
    """Write the data, so many rows of each, and the model before its warm start."""
    from examples.dots.model import build_folder  # imports PyTorch

    (folder / "heldout").mkdir(parents=True)
    rng = random.Random(f"demonstrations/{seed}")
    demonstrations = [demonstration(rng) for _ in range(shown)]
    write_rows(folder / "demonstrations.jsonl", demonstrations)
    rows, pictures = [], set()
    for number, (data, row) in enumerate(_rows(random.Random(f"heldout/{seed}"), held_out)):
        (folder / "heldout" / f"{number:04}.png").write_bytes(data)
        pictures.add(data)
        rows.append({**row, "images": f"heldout/{number:04}.png"})
    write_rows(folder / "heldout.jsonl", rows)
    trained = [
        {**row, "images": [{"bytes": data, "path": None}]}
        for data, row in _rows(random.Random(f"train/{seed}"), train)
        if data not in pictures
    ]
    images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    schema = pa.schema([("prompt", pa.string()), ("label", pa.string()), ("images", images)])
    pq.write_table(pa.Table.from_pylist(trained, schema), folder / "train.parquet")
    texts = (text for row in demonstrations for text in ("user\nassistant\n", *row.values()))
    build_folder(folder / "untrained", texts, seed)


def _rows(rng: random.Random, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Pictures, each with the question and its answer."""
    drawn = (picture(rng) for _ in range(count))
    return [(data, {"prompt": f"<image>{QUESTION}", "label": colour}) for data, colour in drawn]


if __name__ == "__main__":
    main()
