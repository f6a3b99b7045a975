"""Checkpoints as someone forges them who can write to a store: every digest is right, and a pickle leaves a mark.

A program for a process of its own, in which Megatron is made ready for the CPU: `python -m tests.forged_checkpoints
FOLDER ENGINE` writes what came of each forgery into FOLDER/ENGINE.json.
"""

import hashlib
import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.configs.schema.run import RunConfig
from cairn.flows.driver import session
from cairn.flows.history import replay
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.local import LocalStore
from cairn.tasks.trainer.recovery import restore_trainer
from tests.local_fleet import LocalFleet
from tests.older_checkpoints import save_megatron, save_torch
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, write_assets

DESCRIPTIONS = {"torch": "training_state.json", "megatron": "megatron_state.json"}
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self._mark), 0o777, True)


Files = dict[str, bytes]
"""Of a checkpoint, by name; a forgery changes them."""


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def everywhere(files: Files, payload: Payload) -> None:
    """A pickle in the place of every file."""
    files.update(dict.fromkeys(files, pickle.dumps(payload)))


def in_the_common_part(files: Files, payload: Payload) -> None:
    files["common.pt"] = saved({"optimizer": payload})


def as_the_metadata(files: Files, payload: Payload) -> None:
    files[".metadata"] = pickle.dumps(payload)


def in_a_plan_of_the_metadata(files: Files, payload: Payload) -> None:
    metadata = pickle.loads(files[".metadata"])
    metadata.planner_data = payload
    files[".metadata"] = pickle.dumps(metadata)


def _put(files: Files, name: str, value: bytes, *, tensor: bool) -> None:
    """A value in the place of one that is saved under a name, called a tensor or not."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads(files[".metadata"])
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == name]
    place.offset, place.length = len(files[place.relative_path]), len(value)
    files[place.relative_path] += value
    if not tensor:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data = {
            type(index)(index.fqn) if index.fqn == name else index: info
            for index, info in metadata.storage_data.items()
        }
    files[".metadata"] = pickle.dumps(metadata)


def as_a_tensor(files: Files, payload: Payload) -> None:
    _put(files, WORD_EMBEDDINGS, saved(payload), tensor=True)


def as_a_tensor_in_the_old_format(files: Files, payload: Payload) -> None:
    file = io.BytesIO()
    torch.save(payload, file, _use_new_zipfile_serialization=False)
    _put(files, WORD_EMBEDDINGS, file.getvalue(), tensor=True)


def as_a_tensor_that_is_a_program(files: Files, payload: Payload) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"archive/{name}", pickle.dumps(payload))
        archive.writestr("archive/version", "3\n")
    _put(files, WORD_EMBEDDINGS, file.getvalue(), tensor=True)


def as_an_object_where_a_tensor_was(files: Files, payload: Payload) -> None:
    _put(files, WORD_EMBEDDINGS, saved([payload]), tensor=False)


def as_every_object(files: Files, payload: Payload) -> None:
    """What Megatron itself saves as pickles, which are not read: such a checkpoint is as good as any."""
    metadata = pickle.loads(files[".metadata"])
    objects = [index.fqn for index in metadata.storage_data if "_extra_state" in index.fqn]
    assert objects
    for name in objects:
        _put(files, name, saved([payload]), tensor=False)


def of_another_kind(files: Files, payload: Payload) -> None:
    """`metadata.json` chooses who reads the rest: it is not read either."""
    files["metadata.json"] = json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}).encode()
    files["common.pt"] = saved(payload)


def outside_of_the_checkpoint(files: Files, payload: Payload) -> None:
    metadata = pickle.loads(files[".metadata"])
    for place in metadata.storage_data.values():
        place.relative_path = "../../somebody-elses.distcp"
    metadata.planner_data = payload
    files[".metadata"] = pickle.dumps(metadata)


FORGERIES: dict[str, list[Callable[[Files, Payload], None]]] = {
    "torch": [everywhere],
    "megatron": [
        everywhere,
        in_the_common_part,
        as_the_metadata,
        in_a_plan_of_the_metadata,
        as_a_tensor,
        as_a_tensor_in_the_old_format,
        as_a_tensor_that_is_a_program,
        as_an_object_where_a_tensor_was,
        as_every_object,
        of_another_kind,
        outside_of_the_checkpoint,
    ],
}


def forge(store: LocalStore, folder: str, engine: str, forgery: Callable[[Files, Payload], None], mark: Path) -> None:
    """Change the files of a checkpoint and seal its description anew."""
    description = f"{folder}/{DESCRIPTIONS[engine]}"
    state = canonical.unseal(store.read(description))
    files = {file["name"]: store.read(f"{folder}/{file['name']}") for file in state["files"]}
    forgery(files, Payload(mark))
    for file in state["files"]:
        data = files[file["name"]]
        file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        store.write(f"{folder}/{file['name']}", data)
    store.write(description, canonical.seal(state))


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except BaseException as error:  # PyTorch's are no Exceptions
        return f"{type(error).__name__}: {error}"
    return "done"


def resume(store: LocalStore, config: RunConfig) -> None:
    with tiny_context(store.url, config) as (run, _):
        restore_trainer(run, run.committed(2, Step.TRAIN))


@contextmanager
def local_fleet(config: RunConfig, *_: Any, **options: Any) -> Iterator[Callable[[], LocalFleet]]:
    """`starting_fleet` with the engines in this process."""
    yield partial(LocalFleet, config)


def flows(store: LocalStore, config: RunConfig) -> dict[str, str]:
    """What each way to a checkpoint makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (session, replay):
            patch.setattr(module, "starting_fleet", local_fleet)
        forked = fork(Ledger.open(store, "tiny"), 2, "forked", ["training.lr=0.5"])
        ways: dict[str, Callable[[], object]] = {
            "resume": lambda: resume(store, config),
            "replay": lambda: replay.replay(Ledger.open(store, "tiny"), 2, Step.TRAIN),
            "fork": lambda: _restore_point(forked, config),
        }
        return {way: outcome(work) for way, work in ways.items()}


def _restore_point(forked: Ledger, config: RunConfig) -> None:
    lease = forked.acquire(takeover=True)
    try:
        session.make_restore_point(forked, config, session.Sources.open(config), lambda event: None)
    finally:
        lease.release(Outcome.STOPPED)


def convert(store: LocalStore, folder: str, config: RunConfig, target: Path) -> None:
    from cairn.engines.training.megatron.convert import export_checkpoint

    export_checkpoint(store, folder, Path(config.model.path), target, dtype="float32", device=torch.device("cpu"))


def main(work: Path, engine: str) -> None:
    assets = write_assets(work / "assets")
    os.environ["PYTHONPATH"] = str(assets)
    config = tiny_config(
        assets,
        training={"engine": engine, "lr": 1e-3, "num_threads": 1},
        rollout={
            "num_rollout": 4,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
        },
        checkpoint={"save_interval": 2},
    )
    store = LocalStore(str(work / "store"))
    with tiny_context(store.url, config) as (run, _):
        for index in range(3):
            iteration(run, DirectSteps(run), index)
        folder = run.ledger.folder_of(run.committed(1, Step.CHECKPOINT))
        training = run.fleet.training
        training.load(store.url, folder)  # this version writes no pickles, but it reads what earlier ones wrote
        {"torch": save_torch, "megatron": save_megatron}[engine](training.engine, store, folder)
    before = {path: store.read(path) for path in store.find(folder)}
    report: dict[str, Any] = {}
    for forgery in FORGERIES[engine]:
        mark = work / f"mark-{forgery.__name__}"
        forge(store, folder, engine, forgery, mark)
        found = {"load": outcome(lambda: training.load(store.url, folder))}
        if engine == "megatron":
            target = work / f"converted-{forgery.__name__}"
            found["convert"] = outcome(partial(convert, store, folder, config, target))
        if forgery in (everywhere, as_an_object_where_a_tensor_was):
            found |= flows(store, config)
            store.delete(layout.run_manifest("forked"))
        report[forgery.__name__] = {"outcomes": found, "ran": mark.exists()}
        for path, data in before.items():
            store.write(path, data)
    report["undisturbed"] = outcome(lambda: training.load(store.url, folder))
    payload = Payload(work / "mark")
    pickle.loads(pickle.dumps(payload))
    report["payload"] = (work / "mark").exists()
    (work / f"{engine}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
