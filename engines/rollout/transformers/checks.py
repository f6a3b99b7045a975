"""Self-checks of a rollout engine: whether its decoding is right, and whether a sample depends on its batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cairn.engines.rollout.transformers.batch import samples_of
from cairn.engines.rollout.transformers.decoder import Decoder, trial_inputs
from cairn.engines.rollout.transformers.decoding import Decoding
from cairn.engines.rollout.transformers.kv_cache import ALIGNMENT
from cairn.engines.types.types import Completion, GenerateRequest, RequestId, SamplingParams

_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_REDUCED_PRECISION = 0.5
"""Greatest difference of log-probs that rounding explains. With a cache that is used wrongly the error is far
larger."""


def find_decoding_error(decoder: Decoder) -> str | None:
    """Decode a few tokens and compare their log-probs with one full forward pass. Returns what is wrong; None if
    nothing is.

    Architectures whose attention needs more than keys, values, positions and a mask fail here rather than in training.
    """
    requests = _group(0, prompt_length=5, num_samples=1, max_new_tokens=4, decoder=decoder)
    try:
        if decoder.sees_images:
            requests += [_with_image(request, 3, 2, decoder) for request in requests]
        difference = max(_difference(decoder, request) for request in requests)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": .")
    if difference > _TOLERANCE.get(decoder.model.dtype, _TOLERANCE_REDUCED_PRECISION):
        return f"log-probs with a key-value cache differ by {difference:.2g} from those of a full forward pass"
    return None


def is_batch_invariant(decoder: Decoder) -> bool:
    """Return whether a sample's arithmetic is bit for bit the same in any batch, as far as tests can show."""
    return _steps_are_invariant(decoder) and _samples_are_invariant(decoder)


@torch.inference_mode()
def _steps_are_invariant(decoder: Decoder) -> bool:
    """Return whether rows have equal logits in steps with several numbers of rows, in the reverse order, and in
    segments."""
    size, blocks = 23, 2
    rows = decoder.num_rows(size)
    tokens, positions, keys, stores, _, *read = trial_inputs(
        decoder.cache, rows, blocks, decoder.context_length, decoder.vocab_size, decoder.sees_images
    )

    def step(rows: torch.Tensor, *segments: tuple[int, int]) -> torch.Tensor:
        own = torch.tensor(segments or [(len(rows), len(keys))]), *(one[rows] for one in read)
        return decoder.step(tokens[rows], positions[rows], keys, [store[rows] for store in stores], *own)[0]

    every = torch.arange(rows, device=decoder.device)
    logits = step(every)[:size]
    for fewer in (1, 4, 5, 6, 7, 9, 11, 14, 18):
        if not torch.equal(step(every[: decoder.num_rows(fewer)])[:fewer], logits[:fewer]):
            return False
    reverse = step(torch.cat([every[:size].flip(0), every[size:]]))[:size]
    if not torch.equal(reverse.flip(0), logits):
        return False
    if not decoder.in_segments:
        return True
    longest_first = torch.cat([positions[:size].argsort(descending=True), every[size:]])
    long = int((positions[:size] >= ALIGNMENT).sum())
    in_two = step(longest_first, (long, blocks * ALIGNMENT), (rows, ALIGNMENT))
    return torch.equal(in_two[:size], logits[longest_first[:size]])


def _samples_are_invariant(decoder: Decoder) -> bool:
    """Return whether samples are equal alone, in their group, all together, together in the reverse order, and when
    they join others that have begun.

    The prompts' lengths, the groups' sizes and the responses' lengths differ, so that padding, slots and the number of
    rows differ too.
    """
    shapes = [(2, 1, 7), (9, 3, 5), (18, 8, 4), (40, 16, 2), (75, 5, 3)]
    groups = [
        _group(i, prompt_length, num_samples, max_new_tokens, decoder)
        for i, (prompt_length, num_samples, max_new_tokens) in enumerate(shapes)
    ]
    if decoder.sees_images:
        groups += [[_with_image(request, 2 + i, 3, decoder) for request in group] for i, group in enumerate(groups[:2])]
    requests = [request for group in groups for request in group]
    expected = {id: sample for group in groups for id, sample in _run(decoder, group).items()}
    companies = [
        *([group[-1]] for group in groups),
        requests,
        requests[::-1],
    ]
    joining = (groups, groups[::-1], [requests[place::7] for place in range(7)])
    results = [_run(decoder, company) for company in companies] + [_run(decoder, *parts) for parts in joining]
    return all(_same(sample, expected[id]) for samples in results for id, sample in samples.items())


def _group(
    number: int, prompt_length: int, num_samples: int, max_new_tokens: int, decoder: Decoder
) -> list[GenerateRequest]:
    prompt_length = max(1, min(prompt_length, decoder.context_length - max_new_tokens))
    draw = np.random.Generator(np.random.Philox(key=number))
    prompt = draw.integers(decoder.vocab_size, size=prompt_length).tolist()
    # Every second group draws from a part of the vocabulary.
    params = SamplingParams(max_new_tokens=max_new_tokens, top_p=1.0 if number % 2 == 0 else 0.9)
    seeds = draw.integers(2**63, size=num_samples).tolist()
    return [GenerateRequest((number, index), prompt, seed, params) for index, seed in enumerate(seeds)]


def _with_image(request: GenerateRequest, rows: int, columns: int, decoder: Decoder) -> GenerateRequest:
    """Return the request with an image of `rows` × `columns` places before its last token, under another id."""
    from cairn.engines.models.vision import trial_image  # few models need it

    image, token = trial_image(decoder.model, rows, columns, seed=rows), decoder.model.config.image_token_id
    text = [(id + 1) % decoder.vocab_size if id == token else id for id in request.input_ids]
    ids = [*text[:-1], *[token] * (rows * columns), *text[-1:]]
    return replace(request, request_id=(*request.request_id, rows), input_ids=ids, images=(image,))


def _run(decoder: Decoder, *parts: Sequence[GenerateRequest]) -> dict[RequestId, Completion]:
    """Decode requests. Each part joins one step after the part before it."""
    decoding = Decoding(decoder, end_ids=frozenset())
    joining, ended = iter(parts), []
    while (part := next(joining, None)) is not None or decoding.running or decoding.queued:
        decoding.join(samples_of(part or ()))
        ended += decoding.step(weight_version=0)
    return {sample.request.request_id: result for sample, result in ended if isinstance(result, Completion)}


def _difference(decoder: Decoder, request: GenerateRequest) -> float:
    """Return the largest difference of a completion's log-probs from those of a full forward pass."""
    (completion,) = _run(decoder, [request]).values()
    return float(np.abs(completion.log_probs - _full_log_probs(decoder, request, completion)).max())


@torch.inference_mode()
def _full_log_probs(decoder: Decoder, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Return [T] float32 log-probs of the completion's tokens, from one forward pass without a cache."""
    response = torch.from_numpy(completion.response_ids).long()
    ids = np.concatenate([np.asarray(request.input_ids, np.int64), completion.response_ids])
    input_ids = torch.from_numpy(ids)[None].to(decoder.device)
    with _seeing(decoder, ids, request) as image_arguments:
        logits = decoder.model(input_ids=input_ids, use_cache=False, **image_arguments).logits
    logits = logits[0, -len(response) - 1 : -1].float().cpu()
    return torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0].numpy()


def _seeing(decoder: Decoder, ids: np.ndarray, request: GenerateRequest) -> AbstractContextManager[dict[str, Any]]:
    if not request.images:
        return nullcontext({})
    from cairn.engines.models.vision import seeing

    return seeing(decoder.model, [ids], [request.images])


def _same(one: Completion, other: Completion) -> bool:
    return np.array_equal(one.response_ids, other.response_ids) and np.array_equal(one.log_probs, other.log_probs)
