"""SGLang's own API: tokens or text as input, tokens as output."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.engines.agents.capture.protocol import BadRequest, Exchange, refuse_other_sampling, strings, whole_number
from cairn.engines.types.types import FinishReason

if TYPE_CHECKING:
    from cairn.engines.agents.capture.session import Session


async def generate(session: "Session", body: Mapping[str, Any]) -> tuple[dict[str, Any], Exchange]:
    """Serve `POST /generate` for one request.

    Where a text begins with the text of an earlier exchange, its prompt begins with the sampled tokens of that
    exchange. Raises BadRequest.
    """
    fields, stop = _sampling(session, body)
    ends = fields.get("stop_token_ids") or ()
    if {*ends} - {*session.sampling.stop_token_ids} and "stop_token_ids" not in session.ignored:
        raise BadRequest(f"stop_token_ids={ends!r} has to be a subset of rollout.rollout_stop_token_ids")
    prompt_ids = _prompt(session, body)
    exchange, id = await session.sample(prompt_ids, whole_number(fields, "max_new_tokens"), stop)
    segment, template = exchange.segment, session.template
    assert segment.log_probs is not None
    assert segment.weight_versions is not None
    is_cut = segment.finish_reason == FinishReason.LENGTH
    reason = {"type": "length", "length": len(segment)} if is_cut else {"type": "stop", "matched": None}
    ids = segment.ids.tolist()
    about: dict[str, Any] = {
        "id": id,
        "finish_reason": reason,
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": segment.cached_tokens,
        "weight_version": str(int(segment.weight_versions[-1])) if ids else "0",
    }
    if body.get("return_logprob"):
        pairs = zip(segment.log_probs.tolist(), ids, strict=True)
        about["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    text = template.text(ids, skips=bool(fields.get("skip_special_tokens", True)))
    if isinstance(body.get("text"), str):
        session.remember(body["text"] + text, exchange)
    return {"text": text, "output_ids": ids, "meta_info": about}, exchange


def _sampling(session: "Session", body: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a request's sampling parameters, and its stop strings in addition to the run's. Raises BadRequest."""
    fields = body.get("sampling_params") or {}
    if not isinstance(fields, Mapping):
        raise BadRequest("sampling_params has to be an object: send one request at a time")
    params = session.sampling
    refuse_other_sampling(fields, params, session.ignored)
    return fields, tuple(one for one in strings(fields, "stop") if one not in params.stop)


def _prompt(session: "Session", body: Mapping[str, Any]) -> np.ndarray:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("the request needs either input_ids or text")
    if isinstance(text, str) and text:
        return session.tokens(text)
    return _tokens(ids, "input_ids has to be a list of tokens, or text a string: send one request at a time")


def _tokens(ids: Any, problem: str) -> np.ndarray:
    """Return a list of tokens as an array. Raises BadRequest with `problem` for other values."""
    if not isinstance(ids, Sequence) or not ids or not all(type(id) is int and id >= 0 for id in ids):
        raise BadRequest(problem)
    return np.asarray(ids, np.int32)


# vLLM's token endpoint, which `verifiers` 0.4 and `renderers` use: the client tokenizes the prompt and reads the
# sampled tokens.
#
# POST …/inference/v1/generate {"token_ids": [...], "sampling_params": {"stop_token_ids": [...], "logprobs": 1, ...}}
#     {"request_id", "choices": [{"index": 0, "token_ids": [...], "finish_reason": "stop" | "length",
#                                 "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.5}, ...]}}]}


async def generate_of_tokens(session: "Session", body: Mapping[str, Any]) -> tuple[dict[str, Any], Exchange]:
    """Serve `POST /inference/v1/generate`.

    The model's end token and the run's stop settings end a response; a client may name the same ones. Raises
    BadRequest, also where the response holds a stop token of the client that did not end it.
    """
    if body.get("features") or body.get("content_parts"):
        raise BadRequest("images are not supported here: send only tokens")
    fields, stop = _sampling(session, body)
    prompt_ids = _tokens(body.get("token_ids"), "token_ids has to be a list of tokens")
    exchange, id = await session.sample(prompt_ids, whole_number(fields, "max_tokens", "max_new_tokens"), stop)
    segment = exchange.segment
    if passed := {*(fields.get("stop_token_ids") or ())} & {*segment.ids[:-1].tolist()}:
        raise BadRequest(
            f"token {min(passed)} of stop_token_ids was sampled, but did not end the response: add it to "
            "rollout.rollout_stop_token_ids"
        )
    assert segment.log_probs is not None
    pairs = zip(segment.ids.tolist(), segment.log_probs.tolist(), strict=True)
    choice = {
        "index": 0,
        "token_ids": segment.ids.tolist(),
        "finish_reason": "length" if segment.finish_reason == FinishReason.LENGTH else "stop",
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": log_prob} for token, log_prob in pairs]},
    }
    return {"request_id": id, "choices": [choice]}, exchange
