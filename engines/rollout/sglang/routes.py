"""The experts that an SGLang server's model chose for each token.

Asked for by `return_routed_experts`, a server that was started with `enable_return_routed_experts` reports them for all
tokens of a request but the last generated one, of every layer, dense ones too, as int32 in base64.
"""

import base64
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.errors import EngineError
from cairn.engines.routing import ExpertLayers, compact

OPTION = "enable_return_routed_experts"


def routes_problems(config: RolloutConfig) -> Iterator[str]:
    """Sentences on why servers would not report them, asked of the configuration alone."""
    servers = [{**config.sglang, **group.overrides} for group in config.server_groups] or [config.sglang]
    if not config.external_urls and not all(options.get(OPTION) for options in servers):
        yield (
            "algorithm.use_rollout_routing_replay is true, and SGLang reports the experts of a token only where it is "
            f"told to when it starts: set rollout.sglang.{OPTION}: true"
        )
    if any(group.worker_type != "regular" for group in config.server_groups):
        yield (
            "algorithm.use_rollout_routing_replay is true, and the experts of a token are known to two servers where "
            "one does the prefill and another decodes: use regular servers, or leave it out"
        )


class Routes:
    """Of servers of a model."""

    def __init__(self, model: PretrainedConfig) -> None:
        self._model = model.get_text_config()

    @cached_property
    def _layers(self) -> ExpertLayers:
        return ExpertLayers.of(self._model)

    def read(self, meta: dict[str, Any], tokens: int) -> np.ndarray | None:
        """[tokens, layers with experts, top-k] of a reply; None where it says nothing, as of an aborted request.

        Args:
            meta: the reply's `meta_info`.
            tokens: those of which the experts are to be known.

        Raises:
            EngineError: it says something else.
        """
        told = meta.get("routed_experts")
        if told is None:
            return None
        shape = (-1, self._model.num_hidden_layers, self._model.num_experts_per_tok)
        try:
            experts = np.frombuffer(base64.b64decode(told), np.int32).reshape(shape)[:tokens, list(self._layers.places)]
        except ValueError as error:
            raise EngineError(f"the server reports experts that are not of this model: {error}") from error
        if len(experts) < tokens:
            raise EngineError(f"the server reports the experts of {len(experts)} tokens, where it read {tokens}")
        if ((experts < 0) | (experts >= self._layers.num_experts)).any():
            raise EngineError(
                f"the server reports experts from {experts.min()} to {experts.max()}, and the model's are 0 to "
                f"{self._layers.num_experts - 1}"
            )
        if (np.diff(np.sort(experts[:1], -1)) == 0).any():
            raise EngineError(
                "the server reports that one expert was chosen twice for a token, as it does where its kernels choose "
                "and do not say: set rollout.sglang.moe_runner_backend to one that routes apart"
            )
        return compact(experts, self._layers.num_experts)
