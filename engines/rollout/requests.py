"""Checks of requests: what a rollout engine refuses before it generates anything."""

from collections.abc import Callable, Sequence

import numpy as np

from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.types import GenerateRequest, RequestId, SamplingParams


def sees_no_images(request: GenerateRequest) -> str | None:
    """Return what is wrong with a request to an engine whose model reads text alone; None if nothing is."""
    return "it has an image, but the model reads none" if request.images else None


def validate_requests(
    requests: Sequence[GenerateRequest],
    context_length: int,
    vocab_size: int,
    image_problem: Callable[[GenerateRequest], str | None] = sees_no_images,
) -> None:
    """Check requests before anything is generated.

    Args:
        image_problem: returns what is wrong with a request's images, if anything.

    Raises:
        RequestRefused: some requests cannot be served; the error names every one of them.
    """
    of_inputs: dict[int, str | None] = {}  # samples of a group share their input
    refused: dict[RequestId, str] = {}
    for request in requests:
        input_ids = request.input_ids
        if id(input_ids) not in of_inputs:
            of_inputs[id(input_ids)] = _input_problem(input_ids, context_length, vocab_size)
        problem = _own_problem(request, context_length) or of_inputs[id(input_ids)] or image_problem(request)
        if problem is not None:
            refused[request.request_id] = problem
    if refused:
        raise RequestRefused(refused)


def _own_problem(request: GenerateRequest, context_length: int) -> str | None:
    if not -(2**63) <= request.seed < 2**64:
        return "its seed has more than 64 bits"
    return _params_problem(request.sampling_params) or _position_problem(request, context_length)


def _input_problem(input_ids: Sequence[int] | np.ndarray, context_length: int, vocab_size: int) -> str | None:
    tokens = np.asarray(input_ids)
    if len(tokens) == 0:
        return "its prompt is empty; a model needs at least one token to continue"
    if len(tokens) >= context_length:
        return (
            f"its prompt of {len(tokens)} tokens leaves no room in the context of {context_length} tokens; drop it, or "
            "lower rollout_max_prompt_len"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        return f"its prompt holds token {outside}, outside the model's vocabulary of {vocab_size}"
    return None


def _position_problem(request: GenerateRequest, context_length: int) -> str | None:
    drawn, length = request.position, len(request.input_ids)
    if not drawn:
        return None
    if not 0 < drawn < length:
        return f"its position is {drawn}; it must be 0 or more and less than its {length} tokens"
    room = min(request.sampling_params.max_new_tokens, context_length - (length - drawn))
    return f"a response of {drawn} tokens cannot be continued: its limit is {room}" if drawn >= room else None


def _params_problem(params: SamplingParams) -> str | None:
    if params.max_new_tokens < 1:
        return f"max_new_tokens is {params.max_new_tokens}; it must be at least 1"
    if not params.temperature >= 0:
        return f"temperature is {params.temperature}; it must be 0 (greedy) or more"
    if not 0 < params.top_p <= 1:
        return f"top_p is {params.top_p}; it must be above 0 and at most 1"
    if not all(params.stop):
        return "one of its stop strings is empty; every text contains it"
    return None
