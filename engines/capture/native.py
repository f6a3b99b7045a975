"""SGLang's own API: tokens, or text, in, and tokens out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.engines.capture.errors import BadRequest
from cairn.engines.capture.exchanges import Exchange
from cairn.engines.capture.sampling import refuse_other_sampling, strings, whole_number
from cairn.engines.types import FinishReason

if TYPE_CHECKING:
    from cairn.engines.capture.session import Session


async def generate(session: "Session", body: Mapping[str, Any]) -> tuple[dict[str, Any], Exchange]:
    """`POST /generate`, of one request. Text goes on from the tokens of what was sampled before, where it begins with
    their text. Raises BadRequest."""
    how = body.get("sampling_params") or {}
    if not isinstance(how, Mapping):
        raise BadRequest("sampling_params has to be an object: give one request at a time")
    params = session.sampling
    refuse_other_sampling(how, params, session.ignored)
    ends = how.get("stop_token_ids") or ()
    if {*ends} - {*params.stop_token_ids} and "stop_token_ids" not in session.ignored:
        raise BadRequest(f"stop_token_ids={ends!r} has to be what rollout.rollout_stop_token_ids says")
    prompt_ids = _prompt(session, body)
    stop = tuple(one for one in strings(how, "stop") if one not in params.stop)
    exchange, id = await session.sample(prompt_ids, whole_number(how, "max_new_tokens"), stop)
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
    text = template.text(ids, skips=bool(how.get("skip_special_tokens", True)))
    if isinstance(body.get("text"), str):
        session.remember(body["text"] + text, exchange)
    return {"text": text, "output_ids": ids, "meta_info": about}, exchange


def _prompt(session: "Session", body: Mapping[str, Any]) -> np.ndarray:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("one of input_ids and text has to be there")
    if isinstance(text, str) and text:
        return session.tokens(text)
    if isinstance(ids, Sequence) and ids and all(type(id) is int and id >= 0 for id in ids):
        return np.asarray(ids, np.int32)
    raise BadRequest("input_ids has to be a list of tokens, or text a string: give one request at a time")
