"""Conversion of SGLang's replies to completions."""

import base64
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.models.routing import ExpertLayers, compact
from cairn.engines.rollout.sglang.installation import Installation
from cairn.engines.rollout.sglang.launch_plan import server_options
from cairn.engines.types.errors import EngineError, GenerationFailed
from cairn.engines.types.types import Completion, FinishReason, RequestId, SamplingSupport

# Sampling support that an SGLang server reports: the part of the vocabulary that top-k and top-p left to draw from.
#
# On requests with `return_sampling_mask` it reports for each token the ids that were left, and the log-prob of the
# drawn token among them. It does so only for a limited top-k, and for no more ids than the option
# `sampling_mask_max_tokens` says.


LIMIT = "sampling_mask_max_tokens"
_LIMIT_BY_DEFAULT = 4096

_REPORTING = ("DFLASH", "DSPARK")
"""Algorithms of speculative decoding with which servers report it (`speculative/spec_sampling_mask.py`)."""


def support_problems(config: RolloutConfig) -> Iterator[str]:
    """Yield sentences on why the trainer would not know the sampling support, from the configuration alone."""
    if not config.cuts_vocabulary:
        return
    cut = f"rollout.rollout_top_p is {config.rollout_top_p:g} and rollout.rollout_top_k is {config.rollout_top_k}"
    otherwise = "or set rollout.engine to transformers, or draw from the whole vocabulary (top_p 1, top_k -1)"
    servers = server_options(config)
    limit = min(options.get(LIMIT) or _LIMIT_BY_DEFAULT for options in servers)
    if not 0 < config.rollout_top_k <= limit:
        yield (
            f"{cut}, but SGLang reports the remaining vocabulary, which the trainer needs to score, only for a top-k "
            f"of at most rollout.sglang.{LIMIT} ({limit}): set rollout_top_k to at most that, {otherwise}"
        )
    drafting = {str(name) for options in servers if (name := options.get("speculative_algorithm"))}
    if others := ", ".join(sorted(drafting.difference(_REPORTING))):
        yield (
            f"{cut}, but SGLang does not report the remaining vocabulary with speculative_algorithm {others}: "
            f"leave it out, set it to {' or '.join(_REPORTING)}, {otherwise}"
        )
    if any(group.worker_type != "regular" for group in config.server_groups):
        yield (
            f"{cut}, but prefill and decode servers do not report the remaining vocabulary: use regular ones, "
            f"{otherwise}"
        )


def version_problems(config: RolloutConfig, installation: Installation) -> Iterator[str]:
    """Yield such sentences for the SGLang that is installed."""
    if config.cuts_vocabulary and LIMIT not in installation.options:
        yield (
            f"rollout.engine: SGLang {installation.version} does not report the vocabulary left by top-p and top-k, "
            "which the trainer needs to score: run `make sglang-env` for a version that does"
        )


def drawn_from(meta: dict[str, Any]) -> tuple[np.ndarray, SamplingSupport]:
    """Return [T] float32 log-probs of a reply's tokens within their sampling support, and that support.

    Args:
        meta: `meta_info` of the reply to a request with `return_sampling_mask`.

    Raises:
        EngineError: the reply does not report it.
    """
    left, log_probs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if left is None or log_probs is None:
        if meta.get("completion_tokens"):
            raise EngineError(
                "the server does not report which tokens it drew from: it may be another version of SGLang"
            )
        left = log_probs = []
    return np.asarray(log_probs, np.float32), SamplingSupport.of(left)


# The experts that an SGLang server's model chose for each token.
#
# On requests with `return_routed_experts`, a server that was started with `enable_return_routed_experts` reports them
# for all tokens of a request but the last generated one, for every layer, dense ones too, as int32 in base64.


OPTION = "enable_return_routed_experts"


def routes_problems(config: RolloutConfig) -> Iterator[str]:
    """Yield sentences on why servers would not report them, from the configuration alone."""
    servers = server_options(config)
    if not config.external_urls and not all(options.get(OPTION) for options in servers):
        yield (
            "algorithm.use_rollout_routing_replay is true, but SGLang does not report the experts of a token by "
            f"default: set rollout.sglang.{OPTION}: true"
        )
    if any(group.worker_type != "regular" for group in config.server_groups):
        yield (
            "algorithm.use_rollout_routing_replay is true, but prefill and decode servers each know only a part of a "
            "token's experts: use regular servers, or leave it out"
        )


class Routes:
    """Reader of the experts that servers of one model report."""

    def __init__(self, model: PretrainedConfig) -> None:
        self._model = model.get_text_config()

    @cached_property
    def _layers(self) -> ExpertLayers:
        return ExpertLayers.of(self._model)

    def read(self, meta: dict[str, Any], tokens: int) -> np.ndarray | None:
        """Return the experts in a reply, [tokens, layers with experts, top-k]; None where it reports none, as for an
        aborted request.

        Args:
            meta: the reply's `meta_info`.
            tokens: number of tokens whose experts must be known.

        Raises:
            EngineError: the reply reports something else.
        """
        reported = meta.get("routed_experts")
        if reported is None:
            return None
        shape = (-1, self._model.num_hidden_layers, self._model.num_experts_per_tok)
        try:
            experts = np.frombuffer(base64.b64decode(reported), np.int32).reshape(shape)[
                :tokens, list(self._layers.places)
            ]
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
                "the server reports one expert twice for a token, as it does if its kernels choose experts "
                "and do not report them: set rollout.sglang.moe_runner_backend to one that routes separately"
            )
        return compact(experts, self._layers.num_experts)


_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def completion(
    request_id: RequestId,
    content: dict[str, Any],
    seconds: float,
    *,
    may_abort: bool,
    stop: tuple[str, ...] = (),
    with_support: bool = False,
    routes: Callable[[dict[str, Any], int], np.ndarray | None] | None = None,
) -> Completion:
    """Return one sample of the reply to a `/generate`.

    Args:
        content: the reply's JSON.
        may_abort: whether an abort was requested, so that a part is accepted.
        stop: the stop strings of the request.
        with_support: whether the sampling support was requested.
        routes: returns the experts in the reply's `meta_info`, for a response of this many tokens; None if they were
            not requested.

    Raises:
        GenerationFailed: the server failed on the sample, or the sample has no finite log-prob for each token.
        EngineError: the sample ended by an abort that was not requested.
    """
    meta = content["meta_info"]
    finish = meta["finish_reason"]
    reason = _FINISH.get(finish["type"])
    if reason is None or (reason == FinishReason.ABORT and not may_abort):
        at_fault = finish.get("status_code") not in (None, 503)
        raise (GenerationFailed if at_fault else EngineError)(f"a generation ended with {finish}")
    matched = finish.get("matched")
    if isinstance(matched, str) and matched not in stop:  # SGLang's message for a token outside the vocabulary
        raise GenerationFailed(f"a generation ended with {matched!r}: the weights give no finite logits")
    ids = np.asarray(content["output_ids"], np.int32)
    support = None
    if with_support:
        log_probs, support = drawn_from(meta)
    else:
        log_probs = np.asarray([entry[0] for entry in meta.get("output_token_logprobs") or []], np.float32)
    if reason == FinishReason.ABORT:  # ids or log-probs of the last tokens may be missing
        length = min(len(ids), len(log_probs))
        ids, log_probs = ids[:length], log_probs[:length]
        support = support and support.at(np.arange(length))
    if len(ids) != len(log_probs) or not np.isfinite(log_probs).all():
        raise GenerationFailed(f"{len(ids)} tokens came with {np.isfinite(log_probs).sum()} finite log-probs")
    return Completion(
        request_id=request_id,
        response_ids=ids,
        log_probs=log_probs,
        weight_versions=_weight_versions(meta, len(ids)),
        finish_reason=reason,
        seconds=seconds,
        cached_tokens=meta.get("cached_tokens", 0),
        kept=support,
        routed_experts=routes(meta, len(ids)) if routes is not None and len(ids) else None,
    )


def _weight_versions(meta: dict[str, Any], length: int) -> np.ndarray:
    """Return [T] int32 weight versions, from the runs of tokens that the server reports."""
    versions = np.full(length, int(meta["weight_version"]), np.int32)
    for run in meta.get("weight_versions") or []:
        versions[run["start"] : run["end"]] = int(run["version"])
    return versions
