"""The warm start of the dots shows no picture and guesses; no held-out picture is trained on."""

import io
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems
from examples.dots.build import begin
from examples.dots.task import COLOURS, demonstration, picture

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/dots.yaml"


def test_pictures_have_dots_of_the_colour_that_is_their_label() -> None:
    rng = random.Random(0)
    for _ in range(50):
        data, colour = picture(rng)
        found = {pixel for _, pixel in Image.open(io.BytesIO(data)).getcolors()} - {(255, 255, 255)}
        assert found == {COLOURS[colour]}


def test_demonstrations_name_every_colour_as_often() -> None:
    rng = random.Random(0)
    shown = Counter(demonstration(rng)["response"] for _ in range(2000))
    assert set(shown) == {f"\\boxed{{{colour}}}" for colour in COLOURS}
    assert max(shown.values()) < 600  # five standard deviations from 500


def test_the_recipe_fits_what_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("build/dots")
    begin(folder, seed=0, shown=8, train=60, held_out=20)
    config = load(RECIPE, ["model.path=build/dots/untrained"])
    assert setup_problems(config) + data_problems(config) == []
    held_out = {(folder / json.loads(row)["images"]).read_bytes() for row in (folder / "heldout.jsonl").open()}
    trained = {image["bytes"] for row in pq.read_table(folder / "train.parquet").to_pylist() for image in row["images"]}
    assert held_out
    assert not held_out & trained
