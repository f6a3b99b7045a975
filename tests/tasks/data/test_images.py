"""Images of rows: bytes, data URLs and paths become what a model sees; anything else is told by its row."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.schema.data import RowFormat
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.tasks.data.prompts import PromptData
from tests.tiny_run import write_assets
from tests.vision import dots, marks, noise

FORMAT = RowFormat(multimodal_keys={"image": "images"}, label_key=None)
PICTURE = noise(30, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dots(tmp_path_factory.mktemp("root") / "dots") / "untrained"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def opened(path: str, tokenizer: Any, **options: Any) -> PromptData:
    return PromptData.open(FORMAT.model_copy(update=options), path, tokenizer)


def test_bytes_data_urls_and_paths_give_the_same_prompt(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(PICTURE)
    values: list[Any] = [url(PICTURE), "pictures/one.png", str(tmp_path / "pictures/one.png")]
    values += [[value] for value in values] + [{"path": values[1], "bytes": None}]
    data = opened(
        jsonl(tmp_path / "rows.jsonl", *({"prompt": "<image>How many?", "images": v} for v in values)), tokenizer
    )
    images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table(
        {
            "prompt": ["<image>How many?"],
            "images": pa.array([[{"bytes": PICTURE, "path": "one.png"}]], images),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = [data.row(index) for index in range(len(values))]
    rows.append(opened(str(tmp_path / "rows.parquet"), tokenizer).row(0))
    (image,) = rows[0].images
    assert (image.data, image.height, image.width) == (PICTURE, 32, 48)
    assert all(row.images == rows[0].images and row.prompt_ids == rows[0].prompt_ids for row in rows)


def test_each_image_takes_its_places_where_the_prompt_says(tmp_path: Path, folder: Path, tokenizer: Any) -> None:
    start, end, place = marks(str(folder))
    small, large = noise(16, 16), noise(16, 32)
    parts = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " in "}, {"type": "image"}]
    parts.append({"type": "text", "text": "?"})
    rows = [
        {"prompt": "Is <image> in <image>?", "images": [url(small), url(large)]},
        {"prompt": [{"role": "user", "content": parts}], "images": [url(small), url(large)]},
        {"prompt": [{"role": "user", "content": "Is <image> in <image>?"}], "images": [url(small), url(large)]},
        {"prompt": "Is it?", "images": None},
    ]
    data = opened(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer)
    before, between, after = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("Is ", " in ", "?"))
    expected = [*before, start, *[place] * 4, end, *between, start, *[place] * 8, end, *after]
    for index in range(3):
        ids = list(data.row(index).prompt_ids)
        at = ids.index(start) - len(before)
        assert ids[at : at + len(expected)] == expected
        assert data.row(index).prompt_text.count("<|image_pad|>") == 2
    assert data.row(3).images == ()


def test_a_plain_prompt_holds_the_models_own_placeholders(tmp_path: Path, folder: Path, tokenizer: Any) -> None:
    row = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>A dot", "images": url(noise(16, 16))}
    ids = opened(jsonl(tmp_path / "rows.jsonl", row), tokenizer, apply_chat_template=False).row(0).prompt_ids
    assert ids.count(marks(str(folder))[2]) == 4


def test_pixels_are_bounded_by_options(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "<image>?", "images": url(noise(64, 64))})
    (image,) = opened(path, tokenizer, max_pixels=32 * 32).row(0).images
    assert (image.height, image.width) == (32, 32)
    (image,) = opened(path, tokenizer, min_pixels=128 * 128, max_pixels=256 * 256).row(0).images
    assert (image.height, image.width) == (128, 128)
    with pytest.raises(BadData, match=r"min_pixels is 100000000000, above the \d+ pixels .*set max_pixels too"):
        opened(path, tokenizer, min_pixels=10**11)


def test_the_fingerprint_covers_the_files_that_rows_name(tmp_path: Path, tokenizer: Any) -> None:
    picture = tmp_path / "one.png"
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "<image>?", "images": "one.png"})
    picture.write_bytes(PICTURE)
    data = opened(path, tokenizer)
    before = data.fingerprint
    assert opened(path, tokenizer).fingerprint == before
    picture.write_bytes(noise(30, 50, seed=1))
    assert opened(path, tokenizer).fingerprint != before
    with pytest.raises(BadData, match=r"row 1: .*one\.png was changed while it was in use"):
        data.row(0)


BAD: dict[str, tuple[Any, str]] = {
    "missing": ("nowhere.png", "row 1|line 1.*image 1 does not exist at .*nowhere.png"),
    "address": ("http://127.0.0.1/one.png", "is at the address http://127.0.0.1/one.png, which is not downloaded"),
    "number": (3, "is a int, but must be bytes, a data URL or a path"),
    "base64": ("data:image/png;base64,????", "with invalid base64"),
    "no picture": (url(b"hello"), "image 1 is not PNG, JPEG"),
    "narrow": (url(noise(1, 300)), "aspect ratio must be smaller than 200"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_image_that_cannot_be_seen_is_told_by_its_row_before_anything_starts(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    value, message = BAD[name]
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "<image>?", "images": value})
    with pytest.raises(BadData, match=message) as error:
        opened(path, tokenizer)
    assert "rows.jsonl, line 1: image 1" in str(error.value)


def test_a_broken_picture_or_places_that_do_not_fit_fail_the_row_alone(tmp_path: Path, tokenizer: Any) -> None:
    torn = noise(40, 40)[:-200]
    rows = [
        {"prompt": "<image>?", "images": url(torn)},
        {"prompt": "?", "images": url(PICTURE)},
        {"prompt": "<image>?", "images": []},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": url(PICTURE)},
    ]
    messages = [
        "image 1 is broken",
        "1 images, but 0 places",
        "0 images, but 1 places",
        "a message contains an image",
    ]
    data = opened(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer)
    for index, message in enumerate(messages):
        with pytest.raises(BadPrompt, match=f"row {index + 1}.*{message}"):
            data.row(index)


def test_a_column_that_no_row_has_is_told_before_anything_starts(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "?", "images": None}, {"prompt": "?"})
    assert opened(path, tokenizer).row(0).images == ()
    with pytest.raises(BadData, match=r"multimodal_keys.image is image, but no row of .*rows\.jsonl has it"):
        opened(path, tokenizer, multimodal_keys={"image": "image"})


def test_a_model_of_text_is_given_no_images(tmp_path: Path) -> None:
    model = write_assets(tmp_path) / "model"
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "<image>?", "images": url(PICTURE)})
    with pytest.raises(BadData, match=r"the model in .* \(qwen3\) reads none"):
        opened(path, load_tokenizer(str(model)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multimodal_keys": {"video": "clips"}}, "only images can be read"),
        ({"multimodal_keys": {"image": "i"}, "min_pixels": 9, "max_pixels": 4}, "is above max_pixels"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RowFormat.model_validate(options)
