"""vLLM's endpoint of tokens, which `verifiers` 0.4 and the `renderers` speak: the client has made the tokens, and reads
those that were sampled.

    POST …/inference/v1/generate {"token_ids": [...], "sampling_params": {"stop_token_ids": [...], "logprobs": 1, ...}}
    {"request_id", "choices": [{"index": 0, "token_ids": [...], "finish_reason": "stop" | "length",
                                "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.5}, ...]}}]}
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.engines.capture.errors import BadRequest
from cairn.engines.capture.exchanges import Exchange
from cairn.engines.capture.sampling import refuse_other_sampling, strings, whole_number
from cairn.engines.types import FinishReason

if TYPE_CHECKING:
    from cairn.engines.capture.session import Session


async def generate(session: "Session", body: Mapping[str, Any]) -> tuple[dict[str, Any], Exchange]:
    """`POST /inference/v1/generate`. The model's end token ends a response, and so does whatever else the run says; a
    client may name these. Raises BadRequest."""
    how = body.get("sampling_params") or {}
    if not isinstance(how, Mapping):
        raise BadRequest("sampling_params has to be an object")
    if body.get("features") or body.get("content_parts"):
        raise BadRequest("images are not taken here: give the tokens alone")
    params = session.sampling
    refuse_other_sampling(how, params, session.ignored)
    stop = tuple(one for one in strings(how, "stop") if one not in params.stop)
    exchange, id = await session.sample(_prompt(body), whole_number(how, "max_tokens", "max_new_tokens"), stop)
    segment = exchange.segment
    if passed := {*(how.get("stop_token_ids") or ())} & {*segment.ids[:-1].tolist()}:
        raise BadRequest(
            f"token {min(passed)} was sampled and did not end the response, as the client wants it: name it in "
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


def _prompt(body: Mapping[str, Any]) -> np.ndarray:
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(id) is int and id >= 0 for id in ids):
        raise BadRequest("token_ids has to be a list of tokens")
    return np.asarray(ids, np.int32)
