"""What tests ask of rollout engines."""

from collections.abc import Iterable, Iterator, Sequence

from cairn.engines.types.types import Completion, GenerateRequest, RequestId, SamplingParams


def group(number: int, input_ids: Sequence[int], seeds: Iterable[int], params: SamplingParams) -> list[GenerateRequest]:
    """One sample a seed, all from the same tokens."""
    return [GenerateRequest((number, index), input_ids, seed, params) for index, seed in enumerate(seeds)]


def by_id(streamed: Iterable[list[Completion]]) -> dict[RequestId, Completion]:
    """The completions of a stream."""
    return {completion.request_id: completion for part in streamed for completion in part}


def ids(groups: int, samples: int) -> set[RequestId]:
    """Of so many groups."""
    return {(number, index) for number in range(groups) for index in range(samples)}


def grouped(requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    """The requests of each group, as they come."""
    groups: dict[int, list[GenerateRequest]] = {}
    for request in requests:
        groups.setdefault(request.request_id[0], []).append(request)
    yield from groups.values()
