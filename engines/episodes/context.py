"""What `async def generate(ctx, sample)` may ask for."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np

from cairn.engines.episodes.call_ids import next_call
from cairn.engines.trajectories import (
    FIRST_CALL,
    BadTrajectory,
    GeneratedSample,
    SampleRequest,
    Segment,
    Trajectory,
    call_seed,
)
from cairn.engines.types import Completion, FinishReason, GenerateRequest, SamplingParams


class SampleAborted(BaseException):
    """The sample is given up: it may be continued later. No error of user code, which is not to catch it."""


@dataclass(frozen=True)
class _Call:
    """A finished call: the tokens that it went on from, and what was sampled after them."""

    before: np.ndarray
    segment: Segment


class Context:
    """Of one sample."""

    def __init__(
        self,
        sample: SampleRequest,
        params: SamplingParams,
        ask: Callable[[GenerateRequest], Awaitable[Completion]],
        tokenizer: Callable[[], Any],
    ) -> None:
        """`ask` gets an answer from the engine, `tokenizer` loads the model's."""
        self._sample = sample
        self._prompt = np.asarray(sample.prompt_ids, np.int32)
        self._params = params
        self._ask = ask
        self._tokenizer = tokenizer
        self._calls: dict[str, _Call] = {}
        self._count = 0
        self._first = sample.begun
        """What the first call has sampled after the prompt, finished or not."""

    @property
    def tokenizer(self) -> Any:
        """The model's, for the tokens that the world gives; those that were sampled are not to go through it."""
        return self._tokenizer()

    @property
    def max_new_tokens(self) -> int:
        """Tokens that a call may sample at most, unless it says less."""
        return self._params.max_new_tokens

    async def sample(self, ids: Sequence[int] | np.ndarray, *, max_new_tokens: int | None = None) -> Segment:
        """Ask the policy for one continuation of `ids`: the prompt, and all that came after it.

        Its images are seen in all that begins with the prompt. May be called several times, one after the other or side
        by side in tasks. `max_new_tokens` may only be less
        than the run's. Raises RequestRefused where the engine cannot go on from these tokens, for one because they fill
        its context.
        """
        call = next_call()
        before = self._prompt if ids is self._sample.prompt_ids else np.asarray(ids, np.int32)
        params = self._params
        if max_new_tokens is not None:
            params = replace(params, max_new_tokens=min(index(max_new_tokens), params.max_new_tokens))
        at_prompt = call == FIRST_CALL and (before is self._prompt or np.array_equal(before, self._prompt))
        begun = self._first if at_prompt else None
        if begun is None or begun.finish_reason == FinishReason.ABORT:
            begun = await self._sampled(call, self._sample.prompt_ids if at_prompt else before, params, begun)
            if at_prompt:
                self._first = begun
            if begun.finish_reason == FinishReason.ABORT:
                raise SampleAborted
        for array in (begun.ids, begun.log_probs, begun.weight_versions):
            assert array is not None
            array.setflags(write=False)  # user code may change the mask, and nothing else
        self._calls[call] = _Call(before, begun)
        return begun

    async def _sampled(
        self, call: str, before: Sequence[int] | np.ndarray, params: SamplingParams, begun: Segment | None
    ) -> Segment:
        seed = call_seed(self._sample.seed, call)
        id = (*self._sample.key, self._count)
        self._count += 1
        images = self._sample.images if np.array_equal(before[: len(self._prompt)], self._prompt) else ()
        if begun is None or not len(begun):
            request = GenerateRequest(id, before, seed, params, images=images)
        else:
            request = GenerateRequest(id, [*before, *begun.ids], seed, params, len(begun), images)
        completion = await self._ask(request)
        segment = Segment(
            completion.response_ids,
            np.ones(len(completion.response_ids), np.uint8),
            call,
            completion.log_probs,
            completion.weight_versions,
            seed,
            completion.finish_reason,
            completion.kept,
            completion.routed_experts,
            completion.seconds,
            completion.cached_tokens,
        )
        return segment if begun is None else begun.then(segment)

    def aborted(self) -> GeneratedSample:
        """The sample, given up: as far as its first call came."""
        first = () if self._first is None else (self._first,)
        return GeneratedSample(*self._sample.key, Trajectory(first), FinishReason.ABORT)

    def checked(self, returned: object) -> GeneratedSample:
        """The sample that `generate` returned, as the policy gave it: user code says what follows what, and what is
        trained on. Raises BadTrajectory where that is not what the policy was asked for and sampled."""
        trajectories = list(returned) if isinstance(returned, list | tuple) else [returned]
        several = len(trajectories) > 1
        prompts, parts = list[np.ndarray | None](), list[list[Segment]]()
        for number, one in enumerate(trajectories, 1):
            if isinstance(one, Trajectory):
                where = f" of trajectory {number}" if several else ""
                prompts.append(self._own_prompt(one, where))
                parts.append(self._segments(one, prompts[-1], where))
        if not parts or len(parts) < len(trajectories):
            other = next((type(one).__name__ for one in trajectories if not isinstance(one, Trajectory)), None)
            told = "an empty list" if other is None else f"a list with {other}" if several else other
            raise BadTrajectory(f"generate returned {told} for a sample; return a cairn.Trajectory, or a list of them")
        segments = [segment for part in parts for segment in part]
        if several:
            _check_trained_once(segments)
        reasons = [segment.finish_reason for segment in segments if segment.finish_reason is not None]
        own = any(prompt is not None for prompt in prompts)
        return GeneratedSample(
            *self._sample.key,
            Trajectory(segments),
            reasons[-1],
            lengths=tuple(sum(map(len, part)) for part in parts) if several or own else None,
            prompts=tuple(prompts) if own else None,
        )

    def _own_prompt(self, trajectory: Trajectory, where: str) -> np.ndarray | None:
        """Of a trajectory that does not begin after the sample's prompt."""
        if trajectory.prompt_ids is None:
            return None
        prompt = np.asarray(trajectory.prompt_ids, np.int32)
        if prompt.ndim != 1 or not len(prompt):
            raise BadTrajectory(f"the prompt_ids{where} of what generate returned have to be one list with a token")
        return None if np.array_equal(prompt, self._prompt) else prompt

    def _segments(self, trajectory: Trajectory, prompt: np.ndarray | None, where: str) -> list[Segment]:
        """Those of a trajectory after a prompt, None for the sample's; `where` names it among several."""
        before, segments = self._prompt if prompt is None else prompt, list[Segment]()
        for number, segment in enumerate(trajectory.segments, 1):
            if segments:
                before = np.concatenate([before, segments[-1].ids])
            try:
                segments.append(self._checked(segment, before))
            except BadTrajectory as problem:
                raise BadTrajectory(f"segment {number}{where} of what generate returned {problem}") from None
        if not any(segment.call is not None and len(segment) for segment in segments):
            raise BadTrajectory(
                "generate returned a trajectory without a token that was sampled; where there is none, raise an error"
            )
        return segments

    def _checked(self, segment: object, before: np.ndarray) -> Segment:
        if not isinstance(segment, Segment):
            raise BadTrajectory(f"is of type {type(segment).__name__}; it has to be a cairn.Segment")
        mask = np.asarray(segment.loss_mask)
        if np.ndim(segment.ids) != 1:
            raise BadTrajectory(f"has ids of {np.ndim(segment.ids)} dimensions; they have to be one list")
        if mask.shape != (len(segment),):
            told = f"has a loss_mask of {len(mask) if mask.ndim else 'one value'} for {len(segment)} tokens"
            raise BadTrajectory(f"{told}; it needs one value a token")
        if not ((mask == 0) | (mask == 1)).all():
            raise BadTrajectory("has a loss_mask with other values than 0 and 1")
        if segment.call is None:
            if mask.any():
                raise BadTrajectory("lets tokens be trained on that the world gave; their loss_mask has to be 0")
            return Segment.given(segment.ids)
        call = self._calls.get(segment.call)
        if call is None or not (call.segment is segment or np.array_equal(call.segment.ids, segment.ids)):
            raise BadTrajectory(
                f"has other ids than call {segment.call} of ctx.sample gave; return the segment that it returned"
            )
        if call.before is not before and not np.array_equal(call.before, before):
            raise BadTrajectory(
                f"was sampled after {len(call.before)} tokens that are not the {len(before)} before it in the "
                "trajectory; put there what ctx.sample was given"
            )
        return call.segment if call.segment is segment else replace(call.segment, loss_mask=mask.astype(np.uint8))


def _check_trained_once(segments: Sequence[Segment]) -> None:
    """Raise BadTrajectory where a token that was sampled once is trained on in two trajectories, which may share it."""
    trained: dict[str, np.ndarray] = {}
    for segment in segments:
        if segment.call is None:
            continue
        mask, earlier = segment.loss_mask.astype(bool), trained.get(segment.call)
        if earlier is not None and (earlier & mask).any():
            raise BadTrajectory(
                f"generate returned call {segment.call} of ctx.sample in two trajectories, and its loss_mask lets the "
                "same tokens be trained on in both; set it to 0 in one of them"
            )
        trained[segment.call] = mask if earlier is None else earlier | mask
