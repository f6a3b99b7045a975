"""What a rollout engine refuses before it generates anything."""

from collections.abc import Sequence

import numpy as np

from cairn.engines.errors import RequestRefused
from cairn.engines.types import GenerateRequest, SamplingParams


def validate_requests(requests: Sequence[GenerateRequest], context_length: int, vocab_size: int) -> None:
    """Raises: RequestRefused: some cannot be served; it names every one of them."""
    problems = {request.request_id: _problem(request, context_length, vocab_size) for request in requests}
    refused = {request_id: problem for request_id, problem in problems.items() if problem is not None}
    if refused:
        raise RequestRefused(refused)


def _problem(request: GenerateRequest, context_length: int, vocab_size: int) -> str | None:
    if any(not -(2**63) <= seed < 2**64 for seed in request.seeds):
        return "a seed has more than 64 bits"
    return (
        _prompt_problem(request, context_length, vocab_size)
        or _prefix_problem(request, context_length, vocab_size)
        or _params_problem(request.sampling_params)
    )


def _prompt_problem(request: GenerateRequest, context_length: int, vocab_size: int) -> str | None:
    prompt = np.asarray(request.prompt_ids)
    if len(prompt) == 0:
        return "its prompt is empty; a model needs at least one token to continue"
    if len(prompt) >= context_length:
        return (
            f"its prompt of {len(prompt)} tokens leaves no room in the context of {context_length} tokens; drop it, or "
            "lower rollout_max_prompt_len"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        outside = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
        return f"its prompt holds token {outside}, outside the model's vocabulary of {vocab_size}"
    return None


def _prefix_problem(request: GenerateRequest, context_length: int, vocab_size: int) -> str | None:
    if request.prefixes and len(request.prefixes) != len(request.seeds):
        return f"it has {len(request.prefixes)} prefixes for {len(request.seeds)} samples"
    room = min(request.sampling_params.max_new_tokens, context_length - len(request.prompt_ids))
    for prefix in map(np.asarray, request.prefixes):
        if len(prefix) >= room:
            return f"a response of {len(prefix)} tokens cannot be continued: it may have {room}"
        if len(prefix) and (prefix.min() < 0 or prefix.max() >= vocab_size):
            return f"a response so far holds a token outside the model's vocabulary of {vocab_size}"
    return None


def _params_problem(params: SamplingParams) -> str | None:
    if params.max_new_tokens < 1:
        return f"max_new_tokens is {params.max_new_tokens}; it must be at least 1"
    if not params.temperature >= 0:
        return f"temperature is {params.temperature}; it must be 0 (greedy) or more"
    if not 0 < params.top_p <= 1:
        return f"top_p is {params.top_p}; it must be above 0 and at most 1"
    return None
