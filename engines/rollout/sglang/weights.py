"""The weights of an SGLang server: from one version to the next, and none in between."""

import torch

from engines.errors import EngineError
from engines.rollout.sglang.client import Control


class ServerWeights:
    """What a server serves, and the update that is under way.

    Args:
        control: of the server.
        names: of every parameter, tied ones once.
    """

    def __init__(self, control: Control, names: frozenset[str]) -> None:
        self._control = control
        self._names = names
        self._missing: set[str] = set()
        self._updating: int | None = None

    def version(self) -> int | None:
        """Of what it serves; None within an update."""
        if self._updating is not None:
            return None
        return int(self._control.call("/get_model_info")["weight_version"])

    def require_whole(self) -> None:
        """Raises EngineError within an update."""
        if self._updating is not None:
            raise EngineError("The engine is between begin and end of a weight update: end it before generating.")

    def begin(self, version: int) -> None:
        """Start to replace all weights of an idle server, those too that an unfinished update has sent."""
        if self._updating is not None:
            self._control.call("/end_weight_update", {})
        self._updating = version
        self._missing = set(self._names)
        self._control.call("/begin_weight_update", {})

    def load(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Replace some weights. Raises EngineError where a name is unknown; nothing of the call is taken then."""
        self._require_begun()
        unknown = [name for name in named_tensors if name not in self._names]
        if unknown:
            raise EngineError(
                f"The model has no weight {unknown[0]}: trainer and rollout engine hold different models."
            )
        self._control.update_from_tensor(named_tensors)
        self._missing -= set(named_tensors)

    def end(self) -> None:
        """Serve the new weights under their version. Raises EngineError where some were not sent."""
        version = self._require_begun()
        if self._missing:
            raise EngineError(
                f"The update to version {version} lacks {len(self._missing)} weights, the first of them "
                f"{min(self._missing)}: send every parameter between begin and end."
            )
        self._control.call("/end_weight_update", {})
        self._control.call("/flush_cache", {})
        self._control.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._updating = None

    def _require_begun(self) -> int:
        if self._updating is None:
            raise EngineError("No weight update has begun: call begin_weight_update first.")
        return self._updating
