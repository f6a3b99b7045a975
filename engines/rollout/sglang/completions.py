"""From SGLang's replies to completions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cairn.engines.errors import EngineError, GenerationFailed
from cairn.engines.rollout.sglang.kept import drawn_from
from cairn.engines.types import Completion, FinishReason, RequestId

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def completion(
    request_id: RequestId,
    content: dict[str, Any],
    seconds: float,
    *,
    may_abort: bool,
    stop: tuple[str, ...] = (),
    with_kept: bool = False,
    routes: Callable[[dict[str, Any], int], np.ndarray | None] | None = None,
) -> Completion:
    """One sample of the reply to a `/generate`.

    Args:
        content: the reply's JSON.
        may_abort: an abort was asked for, so a part will do.
        stop: the stop strings that were asked for.
        with_kept: what its tokens were drawn from was asked for.
        routes: what the reply's `meta_info` says of experts, for a response of so many tokens, where it was asked.

    Raises:
        GenerationFailed: the server failed on it, or it has no finite log-prob for each token.
        EngineError: it ended by an abort that was not asked for.
    """
    meta = content["meta_info"]
    finish = meta["finish_reason"]
    reason = _FINISH.get(finish["type"])
    if reason is None or (reason == FinishReason.ABORT and not may_abort):
        at_fault = finish.get("status_code") not in (None, 503)
        raise (GenerationFailed if at_fault else EngineError)(f"a generation ended by {finish}")
    matched = finish.get("matched")
    if isinstance(matched, str) and matched not in stop:  # SGLang's words where it drew a token that there is not
        raise GenerationFailed(f"a generation ended by {matched!r}: the weights give no finite logits")
    ids = np.asarray(content["output_ids"], np.int32)
    kept = None
    if with_kept:
        log_probs, kept = drawn_from(meta)
    else:
        log_probs = np.asarray([entry[0] for entry in meta.get("output_token_logprobs") or []], np.float32)
    if reason == FinishReason.ABORT:  # the last tokens may still have been on their way
        length = min(len(ids), len(log_probs))
        ids, log_probs = ids[:length], log_probs[:length]
        kept = kept and kept.at(np.arange(length))
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
        kept=kept,
        routed_experts=routes(meta, len(ids)) if routes is not None and len(ids) else None,
    )


def _weight_versions(meta: dict[str, Any], length: int) -> np.ndarray:
    """[T] int32 from the runs of tokens that the server reports."""
    versions = np.full(length, int(meta["weight_version"]), np.int32)
    for run in meta.get("weight_versions") or []:
        versions[run["start"] : run["end"]] = int(run["version"])
    return versions
