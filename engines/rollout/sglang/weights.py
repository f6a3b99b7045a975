"""The weights of an SGLang server: from one version to the next, and none in between."""

import time
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cairn.engines.errors import EngineDied, EngineError, EngineTimeout
from cairn.engines.rollout.sglang.client import POLICY, Control
from cairn.engines.weights.layout import Layout, Meeting, MemoryTag, Receiver
from cairn.engines.weights.shared import share

IDLE_TIMEOUT = 60.0
"""Seconds in which a server must have ended the requests that an update aborts."""

MEMORY: dict[MemoryTag, list[str]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""The server's own tags."""


class ServerWeights:
    """What a server serves, the update that is under way, and the memory that it gave away.

    Args:
        control: of the server.
        names: of every tensor that an update is to send, tied ones once.
        load_timeout: seconds that loading a model folder may take.
        ours: whether the server was started with the run's initial weights; those of others are unknown, whatever their
            server calls them, until an update has ended.
    """

    def __init__(self, control: Control, names: frozenset[str], load_timeout: float, *, ours: bool) -> None:
        self._control = control
        self._names = names
        self._load_timeout = load_timeout
        self._missing: set[str] = set()
        self._updating: int | None = None
        self._serves = ours
        """Whether requests are taken: with whole weights, and during an update in flight, for which they wait. Requests
        read it meanwhile, so an update in flight never sets it to False."""
        self._session = False
        """Whether the server is open to new weights."""
        self._whole = ours
        self._from_folder = False
        """Whether the weights of this update came as a model folder."""
        self._released: set[MemoryTag] = set()
        self._group: str | None = None

    def version(self) -> int | None:
        """Of what it serves; None within an update, and until the next one where its weights are lost or not ours."""
        if not self._whole:
            return None
        found = self._control.call("/get_model_info")["weight_version"]
        return int(found) if found.isdecimal() else None  # a server that others started may call its weights anything

    def require_ready(self) -> None:
        """Raises EngineError within an update that is not in flight, without memory, and without weights of ours."""
        serves, updating = self._serves, self._updating
        if updating is not None and not serves:
            raise EngineError("The engine is between begin and end of a weight update: end it before generating.")
        if self._released:
            raise EngineError("The engine's memory was released: resume it and update the weights before generating.")
        if not serves:
            raise EngineError("The engine has no weights of this run yet: update them before generating.")

    def begin(self, version: int, *, in_flight: bool = False) -> None:
        """Start to replace all weights, those too that an unfinished update has sent. Requests under way are aborted:
        a server that changes weights under a running request ends. `in_flight`: what is asked meanwhile will wait."""
        if "weights" in self._released:
            raise EngineError("The memory of the weights was released: resume it before an update.")
        self._whole, self._updating, self._serves = False, version, in_flight
        self._missing, self._from_folder = set(self._names), False
        self._control.call("/pause_generation", {"mode": "abort"})
        self._wait_until_idle()
        self._call_unless_refused("/end_weight_update", {})  # of an update that broke off
        self._session = False

    def load(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Replace some weights. Raises EngineError where a name is unknown; nothing of the call is taken then."""
        self.map(named_tensors, [share(named_tensors) for _ in range(self._tp_size)])

    def map(self, names: Collection[str], handles: Sequence[bytes]) -> None:
        """Replace some weights by memory that the server maps, with a handle for each of its tensor-parallel ranks.
        Raises EngineError where a name is unknown; nothing of the call is taken then."""
        self._require_known(names)
        self._open_session()
        self._control.update_from_tensor(handles)
        self._missing -= set(names)

    def load_folder(self, folder: Path) -> None:
        """Replace all weights by those of a model folder. The server does by itself what opening and closing an update
        does to packed weights: no update must be open there."""
        self._require_begun()
        self._close_session()
        body = {"model_path": str(folder), "flush_cache": False}
        self._control.call("/update_weights_from_disk", body, timeout=self._load_timeout)
        self._missing, self._from_folder = set(), True

    def receive(self, layout: Layout) -> None:
        """Replace some weights by one broadcast in the group. Raises EngineError where a name is unknown."""
        names = [name for name, _, _ in layout]
        self._require_known(names)
        self._open_session()
        self._control.call(
            "/update_weights_from_distributed",
            {
                "names": names,
                "dtypes": [dtype for _, dtype, _ in layout],
                "shapes": [list(shape) for _, _, shape in layout],
                "group_name": self._group or "none",
                "load_format": "flattened_bucket",
                "flush_cache": False,
                **POLICY,
            },
        )
        self._missing -= set(names)

    def end(self) -> None:
        """Serve the new weights under their version. Raises EngineError where some were not sent."""
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

    def receiver(self) -> Receiver:
        """The server as a member of a broadcast's group."""
        return Receiver(ranks=self._tp_size, on_gpu=self._info["device"] != "cpu", group=self._group)

    def join_group(self, meeting: Meeting) -> None:
        """Join a group in place of the one it is in. Raises EngineError where not all members came."""
        self.leave_group()
        self._group = meeting.name
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
        )

    def leave_group(self) -> None:
        """Close the server's connections in its group, if there are any."""
        group, self._group = self._group, None
        if group is not None:
            self._call_unless_refused("/destroy_weights_update_group", {"group_name": group})

    def release_memory(self) -> None:
        """Give the GPU memory to others; the weights in it are lost."""
        tags = [tag for tag in MEMORY if tag not in self._released]
        if tags:
            self._whole, self._updating, self._serves = False, None, False
            self._released.update(tags)
            self._wait_until_idle()
            self._control.call("/release_memory_occupation", {"tags": [own for tag in tags for own in MEMORY[tag]]})

    def resume_memory(self, tag: MemoryTag) -> None:
        """Take the GPU memory for weights or cache back."""
        if tag in self._released:
            self._control.call("/resume_memory_occupation", {"tags": MEMORY[tag]})
            self._released.discard(tag)

    def released(self) -> list[str]:
        """What has no memory."""
        return sorted(self._released)

    def _await_all_ranks(self) -> None:
        """Return when every rank has read the folder: the first one answers for all of them as soon as it has, and a
        rank that finds the folder gone keeps its old weights without a word. A token needs all of them."""
        is_whole = self._info.get("disaggregation_mode") in (None, "null")  # a part of a split server gives no token
        if is_whole and self._tp_size > 1:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
            self._control.call("/generate", body, timeout=self._load_timeout)

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
        while any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in self._loads()):
            if time.monotonic() > deadline:
                raise EngineTimeout(f"{self._control.url} did not end its requests within {IDLE_TIMEOUT:g} s")
            time.sleep(0.01)

    def _loads(self) -> list[dict[str, int]]:
        return self._control.call("/v1/loads")["loads"]

    def _require_known(self, names: Iterable[str]) -> None:
        self._require_begun()
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise EngineError(
                f"The model has no weight {unknown[0]}: trainer and rollout engine hold different models."
            )

    def _require_begun(self) -> int:
        if self._updating is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        return self._updating
