"""Reading of a Megatron checkpoint's `.metadata` as data.

PyTorch stores the description of tensors in `.metadata`, a pickle. Its reader runs what the pickle names. PyTorch also
reads values that are not tensors as pickles. Here every name in the pickle becomes a plain record of this module, so
nothing of it is imported or called. PyTorch's own objects are rebuilt from the numbers and names in the records:

    .metadata → records → tensors: number format, size, parts; and of each part the file and place → Metadata

Values that are not tensors are left out. A folder for Megatron then holds only files of tensors, which PyTorch reads
with `weights_only`, and files that we wrote.
"""

import io
import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = ".metadata"
TENSORS = ".distcp"
"""Suffix of files of tensors."""

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def read_metadata(data: bytes, files: Collection[str]) -> Metadata:
    """Return the description in `.metadata` of tensors stored in `files`; other values and all plans are left out.

    Raises:
        ValueError: the data is not what Megatron writes, or a tensor is stored elsewhere. The message states the
            problem.
    """
    try:
        top = _fields(_Records(io.BytesIO(data)).load(), "Metadata")
        values, places = top["state_dict_metadata"], top["storage_data"]
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            _text(name): _tensor(value) for name, value in values.items() if _name(value) != "BytesStorageMetadata"
        }
        of_tensors = [(index, info) for index, info in places.items() if _text(_fields(index)["fqn"]) in tensors]
        return Metadata(tensors, storage_data=dict(_place(index, info, files) for index, info in of_tensors))
    except ValueError:
        raise
    # A pickle that was crafted to be wrong can raise any exception.
    except Exception as error:
        raise ValueError(f"it is not a description of tensors ({type(error).__name__}: {error})") from None


def write_folder(folder: Path, metadata: Metadata) -> None:
    """Write the other files that Megatron reads next to files of tensors.

    They hold the tensors' description, and that nothing else was saved.
    """
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps(_FORMAT))
    torch.save({}, folder / "common.pt")


class _Record:
    """An object of a pickle: the arguments of its class or function, and its state."""

    def __new__(cls, *arguments: Any) -> "_Record":
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle.Unpickler):
    """Unpickler that imports nothing: each name in the pickle becomes a class of records of that name."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self._kinds: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of records, or the named number format."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return self._kinds.setdefault((module, name), type(name, (_Record,), {}))


def _name(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Record) else ""


def _fields(value: Any, name: str = "MetadataIndex") -> Mapping[str, Any]:
    if _name(value) != name or not isinstance(value.state, dict):
        raise ValueError(f"it holds {_name(value) or type(value).__name__} where {name} belongs")
    return value.state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"it holds {value!r:.40} where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it holds {value!r:.40} where a count belongs")
    return value


def _size(value: Any) -> torch.Size:
    if _name(value) != "Size" or len(value.arguments) != 1:
        raise ValueError(f"it holds {value!r:.40} where the size of a tensor belongs")
    return torch.Size([_count(length) for length in value.arguments[0]])


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _fields(value, "TensorStorageMetadata")
    properties = fields["properties"]
    dtype = properties.state[0] if _name(properties) == "TensorProperties" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it holds a tensor without a number format")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _place(index: Any, info: Any, files: Collection[str]) -> tuple[MetadataIndex, _StorageInfo]:
    """Return a part of a tensor and where it is stored."""
    part, place = _fields(index), _fields(info, "_StorageInfo")
    file = _text(place["relative_path"])
    if file not in files:
        raise ValueError(f"it puts {part['fqn']} into {file!r}, which is not a tensor file of the checkpoint")
    if place.get("transform_descriptors"):
        raise ValueError(f"it holds {part['fqn']} in an encoding that Megatron does not write")
    offset, hint = part.get("offset"), part.get("index")
    return (
        MetadataIndex(
            _text(part["fqn"]), None if offset is None else _size(offset), None if hint is None else _count(hint)
        ),
        _StorageInfo(file, _count(place["offset"]), _count(place["length"])),
    )
