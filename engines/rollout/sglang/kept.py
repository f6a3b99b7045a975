"""What an SGLang server says of the part of the vocabulary that top-k and top-p left it to draw from.

Asked for by `return_sampling_mask`, it reports for each token the ids that were left and the log-prob of the one drawn
among them; for a limited top-k alone, and no more ids than the option `sampling_mask_max_tokens` says.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.errors import EngineError
from cairn.engines.rollout.sglang.installation import Installation
from cairn.engines.types import KeptTokens

LIMIT = "sampling_mask_max_tokens"
_LIMIT_BY_DEFAULT = 4096


def kept_problems(config: RolloutConfig) -> Iterator[str]:
    """Sentences on why the trainer would not know what tokens were drawn from, asked of the configuration alone."""
    if not config.cuts_vocabulary:
        return
    cut = f"rollout.rollout_top_p is {config.rollout_top_p:g} and rollout.rollout_top_k is {config.rollout_top_k}"
    otherwise = "or set rollout.engine to transformers, or draw from the whole vocabulary (top_p 1, top_k -1)"
    servers = [{**config.sglang, **group.overrides} for group in config.server_groups] or [config.sglang]
    limit = min(options.get(LIMIT) or _LIMIT_BY_DEFAULT for options in servers)
    if not 0 < config.rollout_top_k <= limit:
        yield (
            f"{cut}, but SGLang reports what is left of the vocabulary, within which the trainer has to score, for a "
            f"top-k of at most rollout.sglang.{LIMIT} ({limit}) alone: set rollout_top_k to some number up to it, "
            f"{otherwise}"
        )
    if any(options.get("speculative_algorithm") for options in servers):
        yield (
            f"{cut}, but SGLang does not report what is left of the vocabulary while it decodes speculatively: leave "
            f"speculative_algorithm out, {otherwise}"
        )
    if any(group.worker_type != "regular" for group in config.server_groups):
        yield (
            f"{cut}, but prefill and decode servers do not report what is left of the vocabulary: use regular ones, "
            f"{otherwise}"
        )


def version_problems(config: RolloutConfig, installation: Installation) -> Iterator[str]:
    """The same, asked of the SGLang that is installed."""
    if config.cuts_vocabulary and LIMIT not in installation.options:
        yield (
            f"rollout.engine: SGLang {installation.version} does not report what top-p and top-k leave of the "
            "vocabulary, within which the trainer has to score: run `make sglang-env` for a version that does"
        )


def drawn_from(meta: dict[str, Any]) -> tuple[np.ndarray, KeptTokens]:
    """[T] float32 log-probs of a reply's tokens among those that were left, and these.

    Args:
        meta: the reply's `meta_info`, to a request with `return_sampling_mask`.

    Raises:
        EngineError: it does not say.
    """
    left, log_probs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if left is None or log_probs is None:
        if meta.get("completion_tokens"):
            raise EngineError("the server does not say what it drew tokens from: it may be another version of SGLang")
        left = log_probs = []
    return np.asarray(log_probs, np.float32), KeptTokens.of(left)
