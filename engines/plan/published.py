"""Published models: configs with the library's defaults filled in, and shapes of all tensors.

They are stored in `shapes.jsonl`, a line for each name of `cairn.configs.catalogue`: a plan of one needs neither
PyTorch nor the library, which take seconds to import. Layers with the same tensor share an entry:
`model.layers.0-2,4.mlp.…`. After a change of the published configs or of the library,
`python -m tests.published_shapes` writes the file anew.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from cairn.configs.catalogue import published_config
from cairn.engines.plan.tensors import Model, Tensor

SHAPES = Path(__file__).with_name("shapes.jsonl")

LAYERS = re.compile(r"(?<=\blayers\.)[\d,-]+(?=\.)")
"""The layers in a name."""


class StoredConfig(SimpleNamespace):
    """Config of a language model, with the names of the library."""

    model_type: str

    def get_text_config(self) -> "StoredConfig":
        return self


def published_model(name: str) -> Model:
    """Return the published model `name`, from its line or, where there is none yet, from the library. Raises BadModel
    where the library cannot make it."""
    with SHAPES.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(_start(name)):
                values = json.loads(line)
                return Model(StoredConfig(**values["config"]), tuple(_expanded(values["tensors"])))
    return made_model(name)


def made_model(name: str) -> Model:
    """Return the published model `name`, made by the library. Raises BadModel."""
    from cairn.engines.plan.library import config_of, model_of

    stored = published_config(name)
    assert stored is not None, name
    return model_of(config_of(stored))


def _start(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, '


def _expanded(entries: Mapping[str, Sequence[int]]) -> Iterator[Tensor]:
    for inside, group in groupby(entries.items(), lambda entry: LAYERS.search(entry[0]) is not None):
        if not inside:
            yield from (Tensor(name, tuple(shape)) for name, shape in group)
            continue
        by_layer: dict[int, list[Tensor]] = {}
        for name, shape in group:
            for layer in _of_ranges(LAYERS.search(name)[0]):  # type: ignore[index]
                by_layer.setdefault(layer, []).append(Tensor(LAYERS.sub(str(layer), name), tuple(shape)))
        for layer in sorted(by_layer):
            yield from by_layer[layer]


def _of_ranges(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
