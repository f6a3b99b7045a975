"""The weights of an SGLang server: from one version to the next, with none served in between."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cairn.engines.models.folders import open_weights
from cairn.engines.models.published import is_exact
from cairn.engines.rollout.sglang.server import LOADS, POLICY, Control
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, WeightsDiffer
from cairn.engines.weights.buckets import share
from cairn.engines.weights.layout import Layout, Meeting, MemoryTag, Receiver, StoredVersion
from cairn.engines.weights.versions import HeldVersion
from cairn.storage.opening import open_store

IDLE_TIMEOUT = 60.0
"""Seconds within which a server must have ended the requests that an update aborts."""

BUCKET_BYTES = 512 << 20
"""Size from which on a bucket of weights from a store is sent to the server."""

MEMORY: dict[MemoryTag, list[str]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""The server's own tags, for each of Cairn's."""


class ServerWeights:
    """The part of an SGLang engine that takes weights: those that the server serves, the update that is under way, and
    the memory that it released. `cairn.engines.rollout.base` describes the methods.

    Args:
        control: calls to the server.
        names: names of all tensors that an update must send; tied ones count once.
        load_timeout: seconds that loading a model folder may take.
        checked: the number format in which the server's ranks record what they receive, by `plugin/`; None where they
            do not.
        has_weights: whether the server was started with the run's initial weights. The weights of other servers are
            unknown until an update has ended, whatever version they report.
    """

    def __init__(
        self, control: Control, names: frozenset[str], load_timeout: float, *, checked: str | None, has_weights: bool
    ) -> None:
        self._control = control
        self._names = names
        self._load_timeout = load_timeout
        self._checked = checked
        self._left_out: list[str] = []
        """Weights that came with this update and that its checksum does not cover."""
        self._missing: set[str] = set()
        self._updating: int | None = None
        self._serves = has_weights
        """Whether requests are taken: with whole weights, and during an update in flight, for which they wait. Requests
        read it meanwhile, so an update in flight never sets it to False."""
        self._session = False
        """Whether the server accepts new weights at the moment."""
        self._whole = has_weights
        self._from_folder = False
        """Whether the weights of this update came as a model folder."""
        self._released: set[MemoryTag] = set()
        self._group: Meeting | None = None
        self._copy: dict[str, torch.Tensor] = {}
        """Copy on the host of the weights that were read from a store."""
        self._held = HeldVersion(lambda: self._copy, self._keep_copy)
        self._served_digest: str | None = None
        """Checksum of the weights that the server has, where they were read from a store."""

    def get_weight_version(self) -> int | None:
        """Return the version of the weights that the server serves. None within an update, and until the next one where
        its weights are lost or not those of the run."""
        if not self._whole:
            return None
        version = self._control.call("/get_model_info")["weight_version"]
        return int(version) if version.isdecimal() else None  # a server that others started may report any name

    def require_ready(self) -> None:
        """Raise EngineError within an update that is not in flight, without memory, and without weights of this run."""
        serves, updating = self._serves, self._updating
        if updating is not None and not serves:
            raise EngineError("The engine is between begin and end of a weight update: end it before generating.")
        if self._released:
            raise EngineError("The engine's memory was released: resume it and update the weights before generating.")
        if not serves:
            raise EngineError("The engine has no weights of this run yet: update them before generating.")

    def begin_weight_update(self, version: int, in_flight: bool = False) -> None:
        """Start to replace all weights, also those that an unfinished update has sent. Running requests are aborted,
        because a server ends if its weights change under a running request. `in_flight`: requests that come meanwhile
        will wait."""
        if "weights" in self._released:
            raise EngineError("The memory of the weights was released: resume it before an update.")
        if self._updating is not None:  # it may have changed some weights
            self._held.digest = self._served_digest = None
        self._whole, self._updating, self._serves = False, version, in_flight
        self._missing, self._from_folder = set(self._names), False
        self._control.call("/pause_generation", {"mode": "abort"})
        self._wait_until_idle()
        self._call_unless_refused("/end_weight_update", {})  # of an update that broke off
        self._session, self._left_out = False, []
        if self._checked:
            exact = sorted(filter(is_exact, self._names))
            self._check_weights(f"record {self._checked}", exact)

    def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        self._served_digest = None
        with self._replacing(named_tensors):
            self._control.update_from_tensor([share(named_tensors) for _ in range(self._tp_size)])

    def map_weights(self, names: Collection[str], handles: Sequence[bytes]) -> None:
        self._served_digest = None
        with self._replacing(names):
            self._control.update_from_tensor(handles)

    def update_weights_from_store(self, store_url: str, versions: Sequence[StoredVersion]) -> None:
        """Bring a copy on the host to the version, and send the server what changed since the version that it has: all
        weights where it has another one."""
        self._require_begun()
        before, self._served_digest = self._served_digest, None
        at = self._held.digest
        changed = self._held.advance(open_store(store_url), versions)
        if changed is None or before is None or before != at:
            changed = frozenset(self._copy)
        elif self._checked:
            self._check_weights("continue", [])
        bucket: dict[str, torch.Tensor] = {}
        for name in sorted(changed):
            bucket[name] = self._copy[name]
            if sum(tensor.nbytes for tensor in bucket.values()) >= BUCKET_BYTES:
                self.update_weights(bucket)
                bucket = {}
        if bucket:
            self.update_weights(bucket)
        self._missing -= self._copy.keys()
        self._served_digest = versions[-1].digest

    def _keep_copy(self, weights: dict[str, torch.Tensor]) -> None:
        self._copy = weights

    def update_weights_from_disk(self, folder: Path) -> None:
        """Replace all weights with those of a model folder. The server itself does to packed weights what the begin and
        end of an update do, so no update may be open there."""
        self._require_begun()
        self._close_session()
        self._served_digest = None
        body = {"model_path": str(folder), "flush_cache": False}
        self._control.call("/update_weights_from_disk", body, timeout=self._load_timeout)
        self._missing, self._from_folder = set(), True
        self._left_out = sorted(open_weights(folder).keys() - self._names)

    def receive_weights(self, layout: Layout) -> None:
        self._served_digest = None
        names = [name for name, _, _ in layout]
        body = {
            "names": names,
            "dtypes": [dtype for _, dtype, _ in layout],
            "shapes": [list(shape) for _, _, shape in layout],
            "group_name": self._group.name if self._group else "none",
            "load_format": "flattened_bucket",
            "flush_cache": False,
            **POLICY,
        }
        with self._replacing(names):
            self._control.call("/update_weights_from_distributed", body, self._group.timeout if self._group else None)

    def end_weight_update(self) -> None:
        version = self._require_begun()
        if self._missing:
            raise EngineError(
                f"The update to version {version} lacks {len(self._missing)} weights, the first of them "
                f"{min(self._missing)}: send every parameter between begin and end."
            )
        self._close_session()
        self._control.call("/flush_cache", {})
        self._control.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._control.call("/continue_generation", {})
        if self._from_folder and not self._released:
            self._await_all_ranks()
        self._whole, self._updating, self._serves = True, None, True

    def weights_checksum(self) -> str | None:
        """Return the checksum of the weights that every rank received since the update began, before the server cut and
        merged them; None where the ranks record nothing: see `plugin/`. Raises WeightsDiffer where ranks differ."""
        if not self._checked:
            return None
        ranks = self._check_weights("recorded", self._left_out)["ranks"]
        found = {int(one["parallelism_info"][0]["tp_rank"]): str(one["checksums"]["recorded"]) for one in ranks}
        if len(found) != self._tp_size:
            raise EngineError(f"{self._control.url} reported the weights of {len(found)} of {self._tp_size} ranks")
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{rank}: {checksum[:12]}" for rank, checksum in sorted(found.items()))
            raise WeightsDiffer(f"the ranks of {self._control.url} received different weights, by checksum {listed}")
        return found[0]

    def loaded_checksum(self) -> str:
        """Return SGLang's own checksum of the tensors that its ranks hold."""
        return str(self._check_weights("checksum", [])["per_engine_checksum"])

    def receiver(self) -> Receiver:
        group = self._group.name if self._group else None
        return Receiver(ranks=self._tp_size, on_gpu=self._info["device"] != "cpu", group=group)

    def join_group(self, meeting: Meeting) -> None:
        self.leave_group()
        self._group = meeting
        self._control.call(
            "/init_weights_update_group",
            {
                "master_address": meeting.host,
                "master_port": meeting.port,
                "rank_offset": meeting.rank,
                "world_size": meeting.size,
                "group_name": meeting.name,
                "backend": meeting.backend,
            },
            meeting.timeout,
        )

    def leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._call_unless_refused("/destroy_weights_update_group", {"group_name": group.name})

    def release_memory(self) -> None:
        """Release the GPU memory; the weights in it are lost."""
        tags = [tag for tag in MEMORY if tag not in self._released]
        if tags:
            self._whole, self._updating, self._serves = False, None, False
            self._released.update(tags)
            self._served_digest = None
            self._wait_until_idle()
            self._control.call("/release_memory_occupation", {"tags": [own for tag in tags for own in MEMORY[tag]]})

    def resume_memory(self, tag: MemoryTag) -> None:
        if tag in self._released:
            self._control.call("/resume_memory_occupation", {"tags": MEMORY[tag]})
            self._released.discard(tag)

    def released(self) -> list[str]:
        """Return the tags of the memory that is released."""
        return sorted(self._released)

    def _await_all_ranks(self) -> None:
        """Wait until every rank has read the folder, by generating a token, which needs all of them. The first rank
        responds for all ranks as soon as it has read the folder. A rank that finds the folder gone keeps its old
        weights without an error."""
        is_whole = self._info.get("disaggregation_mode") in (None, "null")  # a part of a split server gives no token
        if is_whole and self._tp_size > 1:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
            self._control.call("/generate", body, timeout=self._load_timeout)

    def _check_weights(self, action: str, names: Sequence[str]) -> dict[str, Any]:
        body = {"action": action, "skip_tensor_list": names, **POLICY}
        return self._control.call("/weights_checker", body)

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._control.call("/get_server_info")

    @property
    def _tp_size(self) -> int:
        return int(self._info["tp_size"])

    def _open_session(self) -> None:
        if not self._session:
            self._control.call("/begin_weight_update", POLICY)
            self._session = True

    def _close_session(self) -> None:
        if self._session:
            self._control.call("/end_weight_update", {})
            self._session = False

    def _call_unless_refused(self, path: str, body: dict[str, str]) -> None:
        try:
            self._control.call(path, body)
        except (EngineDied, EngineTimeout):
            raise
        except EngineError:
            pass  # there was nothing to end

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + IDLE_TIMEOUT
        while any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in self._control.call(LOADS)["loads"]):
            if time.monotonic() > deadline:
                raise EngineTimeout(f"{self._control.url} did not end its requests within {IDLE_TIMEOUT:g} s")
            time.sleep(0.01)

    @contextmanager
    def _replacing(self, names: Collection[str]) -> Iterator[None]:
        """Have the server accept these weights meanwhile. Raises EngineError where a name is unknown."""
        self._require_begun()
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise EngineError(
                f"The model has no weight {unknown[0]}: trainer and rollout engine hold different models."
            )
        self._open_session()
        yield
        self._missing -= set(names)

    def _require_begun(self) -> int:
        if self._updating is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        return self._updating
