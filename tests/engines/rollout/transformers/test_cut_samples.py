"""Rounds of tokens: a sample that is cut off and goes on, again and again, is the one that it would have been."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.keeping import SampleEnd, WantedSample
from cairn.engines.types.trajectories import GeneratedSample, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason, SamplingParams
from cairn.tasks.generation.rounds import in_rounds
from tests.engines.rollout.models import END_TOKEN, rollout_config

LENGTH, GROUPS = 16, 12
PARAMS = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=tuple(range(40)))
Found = dict[SampleKey, GeneratedSample]
Generate = Callable[[Sequence[SampleRequest]], Iterator[list[GeneratedSample]]]


def asked(groups: int = GROUPS) -> list[SampleRequest]:
    """Two samples of each prompt."""
    keys = [(id, index) for id in range(groups) for index in range(2)]
    return [SampleRequest(id, index, [60 + id, 61, 62, 63], 100 * id + index) for id, index in keys]


def generating(engine: SampleEngine, params: SamplingParams = PARAMS) -> Generate:
    def generate(samples: Sequence[SampleRequest]) -> Iterator[list[GeneratedSample]]:
        for reported in engine.generate(samples, params, GenerateFunction("single_turn")):
            assert isinstance(reported, list)
            yield reported

    return generate


def all_of(stream: Iterator[list[GeneratedSample]]) -> Found:
    return {sample.key: sample for part in stream for sample in part}


def cut_in_rounds(generate: Generate, samples: Sequence[SampleRequest], **options: Any) -> Found:
    """The samples of `in_rounds`, each continued from the tokens that it had at its last cut."""
    missing, found = {one.key: one for one in samples}, Found()

    def ends(wanted: Sequence[WantedSample]) -> Iterator[list[SampleEnd]]:
        for part in generate([replace(missing[one.key], cut_at=one.cut_at) for one in wanted]):
            for sample in part:
                if sample.finish_reason == FinishReason.ABORT:
                    begun = next(iter(sample.trajectory.segments), missing[sample.key].begun)
                    missing[sample.key] = replace(missing[sample.key], begun=begun)
                else:
                    found[sample.key] = sample
            yield list(map(SampleEnd.of, part))

    deque(in_rounds(ends, [WantedSample(one.group_id, one.index, 0) for one in samples], **options), maxlen=0)
    return {key: GeneratedSample.aborted(one) for key, one in missing.items()} | found


def in_their_rounds(generate: Generate, cut_tokens: int) -> tuple[Found, dict[SampleKey, int]]:
    """Samples to their ends, and in which round each came to its."""
    rounds, ended = 0, {}

    def counted(samples: Sequence[SampleRequest]) -> Iterator[list[GeneratedSample]]:
        nonlocal rounds
        rounds += 1
        for part in generate(samples):
            ended.update({one.key: rounds for one in part if one.finish_reason != FinishReason.ABORT})
            yield part

    return cut_in_rounds(counted, asked(), cut_tokens=cut_tokens, enough=GROUPS, ended={}), ended


def differences(result: Found, uncut: Found) -> list[SampleKey]:
    """Samples with other tokens, another end, or log-probs that differ by more than rounding."""
    assert result.keys() == uncut.keys()
    differ = []
    for key, sample in result.items():
        (one,), (other,) = sample.trajectory.segments, uncut[key].trajectory.segments
        assert one.log_probs is not None
        assert other.log_probs is not None
        same = one.ids.tolist() == other.ids.tolist() and one.finish_reason == other.finish_reason
        if not same or np.abs(one.log_probs - other.log_probs).max() > 1e-4:
            differ.append(key)
    return differ


@pytest.fixture
def engine(qwen3: TransformersEngine) -> SampleEngine:
    return SampleEngine(qwen3.open, qwen3.abort)


@pytest.mark.parametrize("cut_tokens", [1, 4, 5])
def test_a_sample_that_is_cut_again_and_again_is_the_same(engine: SampleEngine, cut_tokens: int) -> None:
    generate = generating(engine)
    uncut = all_of(generate(asked()))
    result, ended = in_their_rounds(generate, cut_tokens)
    lengths = {key: len(sample.trajectory.response_ids) for key, sample in uncut.items()}
    stopped = {lengths[key] for key, sample in uncut.items() if sample.finish_reason == FinishReason.STOP}
    assert stopped & {4, 8, 12}, "some end where others are cut"
    assert FinishReason.LENGTH in {sample.finish_reason for sample in uncut.values()}
    assert differences(result, uncut) == []
    assert ended == {key: max(1, -(-length // cut_tokens)) for key, length in lengths.items()}


def test_a_part_has_what_its_tokens_were_drawn_from_and_as_many_as_it_was_cut_at(engine: SampleEngine) -> None:
    generate = generating(engine, SamplingParams(LENGTH, top_k=5, return_sampling_support=True))
    parts = cut_in_rounds(generate, asked(2), cut_tokens=5, enough=0, ended={})
    assert all(not sample.trajectory.segments for sample in parts.values()), "enough before a round"
    for sample in cut_in_rounds(generate, asked(2), cut_tokens=5, enough=1, ended={7: 2}).values():
        (segment,) = sample.trajectory.segments
        if sample.finish_reason == FinishReason.ABORT:
            assert len(segment) == len(segment.loss_mask) == 10, "a group that another attempt saw end in round 2"
        assert segment.kept is not None
        assert segment.kept.first_without(segment.ids) is None
        assert segment.kept.counts.tolist() == [5] * len(segment)


def test_where_the_context_ends_nothing_is_cut(model_folders: dict[str, str]) -> None:
    """125 of a context of 128 tokens are the prompt's: 3 are left, whether fewer or more would be asked for."""
    engine = TransformersEngine(model_folders["qwen3"], rollout_config())
    samples = [SampleRequest(0, 0, [60] * 125, 3)]
    for cut_tokens in (1, 2, 3, 4):
        generate = generating(SampleEngine(engine.open, engine.abort), SamplingParams(LENGTH))
        (sample,) = cut_in_rounds(generate, samples, cut_tokens=cut_tokens, enough=1, ended={}).values()
        ids = sample.trajectory.response_ids.tolist()
        assert sample.finish_reason == (FinishReason.STOP if END_TOKEN in ids else FinishReason.LENGTH)
        assert END_TOKEN in ids or len(ids) == 3
