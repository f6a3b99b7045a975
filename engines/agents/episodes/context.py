"""The context that `async def generate(ctx, sample)` receives."""

import hashlib
import math
import numbers
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import isawaitable
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cairn.configs.kinds import GENERATE, REWARD, written_for_slime
from cairn.configs.plugins import BadPlugin, load_callable
from cairn.configs.schema.rollout import ToolOptions
from cairn.configs.slime import values_read
from cairn.engines.agents.episodes.recorder import Recorder, SampleAborted, UncertainEffect, next_call, outside_code
from cairn.engines.agents.episodes.returned import Continuation, checked_sample
from cairn.engines.agents.tools.errors import JudgeFailed, Reason, ToolFailed, ToolLost, ToolUnavailable, storable
from cairn.engines.agents.tools.processes import waiting
from cairn.engines.agents.tools.results import json_value, shortened
from cairn.engines.agents.tools.tool import NOT_DONE, Intent, Tool, raised
from cairn.engines.models.tokenizers import stop_clock
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.trajectories import (
    FIRST_CALL,
    CallKind,
    CallRecord,
    GeneratedSample,
    SampleRequest,
    Segment,
    Trajectory,
    call_seed,
)
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingParams
from cairn.storage.store import canonical
from cairn.storage.store.canonical import from_json

if TYPE_CHECKING:
    from cairn.configs.schema.run import RunConfig


# Settings of the run that episodes use, besides sampling. Plain values, since they go to another process.


@dataclass(frozen=True)
class EpisodeOptions:
    """Options of the section `rollout`, which describes each of them."""

    tools: tuple[str, ...] = ()
    tool_options: ToolOptions = field(default_factory=ToolOptions)
    tool_call_format: Literal["template", "tags"] = "template"
    max_turns: int = 16
    max_context_len: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """Values of `args` for a generate function written for slime."""

    @classmethod
    def of(cls, config: "RunConfig") -> "EpisodeOptions":
        """Return the options of a run's configuration. Raises BadPlugin."""
        rollout = config.rollout
        function = GENERATE.load(rollout.custom_generate_function_path)
        return cls(
            rollout.tools,
            rollout.tool_options,
            rollout.tool_call_format,
            rollout.max_turns,
            rollout.rollout_max_context_len,
            values_read(config, function) if written_for_slime(function) else {},
        )


_MAX_LOSSES = 3
"""Number of times that a tool with effects may lose its process in a call."""


class Context:
    """The context of one sample. Results of its methods are recorded; code that runs again receives the recorded
    ones."""

    def __init__(
        self,
        sample: SampleRequest,
        params: SamplingParams,
        ask: Callable[[GenerateRequest], Awaitable[Completion]],
        tokenizer: Callable[[], Any],
        recorder: Recorder,
        tools: Callable[[], Mapping[str, Tool]] = dict,
        options: EpisodeOptions | None = None,
        waits: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the context of a sample.

        Args:
            ask: returns the engine's completion of a request.
            tokenizer: loads the model's tokenizer.
            tools: loads the run's tools.
            waits: entered while a tool waits for a resource that others hold.
        """
        self._sample = sample
        self._prompt = np.asarray(sample.prompt_ids, np.int32)
        self._params = params
        self._ask = ask
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._tools = tools
        self._waits = waits
        self.options = options or EpisodeOptions()
        """Options of the run, for built-in generate functions."""
        self._calls: dict[str, Continuation] = {}
        self._count = 0
        self._first = sample.begun
        """Segment that the first call has sampled after the prompt, complete or not."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for text of the environment. Never re-tokenize what was sampled."""
        tokenizer = self._tokenizer()
        if self._sample.origin is not None:
            stop_clock(tokenizer, self._sample.origin.created_at)
        return tokenizer

    @cached_property
    def tools(self) -> Mapping[str, Tool]:
        """The tools of `rollout.tools` by name, each with the state of this sample."""
        return {name: tool.for_episode() for name, tool in self._tools().items()}

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens that a call samples, unless the call sets a lower one."""
        return self._params.max_new_tokens

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of all calls, apart from what a call itself sets."""
        return self._params

    @property
    def replaying(self) -> bool:
        """Whether recorded responses of an earlier run of the code, here or in another process, are still to be
        replayed."""
        return self._recorder.replaying

    def is_recorded(self, call: str) -> bool:
        """Return whether an earlier attempt recorded the response to a call, by its id."""
        return self._recorder.has_response(call)

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        record = self._new_record(next_call("n"), CallKind.NOW, "", _digest(""))
        return float(self._recorder.value(record, lambda: repr(time.time())))

    def random(self) -> random.Random:
        """Return a random number generator. It is the same wherever the sample is generated; each call returns another
        one."""
        return random.Random(call_seed(self._sample.seed, next_call("r")))

    async def sample(
        self, ids: Sequence[int] | np.ndarray, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Segment:
        """Sample one continuation of `ids`: the prompt, and all tokens after it.

        The model sees the sample's images in all `ids` that begin with the prompt. Several calls may run, one after the
        other or in concurrent tasks. Raises RequestRefused where the engine cannot continue these tokens, for example
        because they fill its context.

        Args:
            max_new_tokens: maximum number of tokens, at most the run's.
            stop: strings that end the continuation, in addition to the run's.
        """
        call = next_call()
        before = self._prompt if ids is self._sample.prompt_ids else np.asarray(ids, np.int32)
        params = self._params
        if max_new_tokens is not None:
            params = replace(params, max_new_tokens=min(index(max_new_tokens), params.max_new_tokens))
        if stop:
            params = replace(params, stop=tuple(dict.fromkeys((*params.stop, *stop))))
        if self._recorder.records:
            segment = await self._recorded(call, before, params, stop)
        else:
            segment = await self._continued(call, before, params)
        self._calls[call] = Continuation(before, segment)
        return segment

    async def _recorded(self, call: str, before: np.ndarray, params: SamplingParams, stop: Sequence[str]) -> Segment:
        limits = f"{params.max_new_tokens}/" + "".join(f"{one!r}/" for one in stop)
        digest = hashlib.sha256(limits.encode() + before.tobytes()).hexdigest()
        sha256 = hashlib.sha256(before.tobytes()).hexdigest()  # for `cairn verify`
        arguments = canonical.to_json({"sha256": sha256})
        record = self._new_record(call, CallKind.SAMPLE, "", digest, arguments, tokens=len(before))

        async def sample(record: CallRecord) -> CallRecord:
            try:
                segment = await self._continued(call, before, params)
            except RequestRefused as refused:
                return _with_answer(record, error="; ".join(refused.refused.values()))
            return _with_answer(record, segment=segment)

        answer = await self._recorder.answer(record, sample)
        if answer.segment is None:
            raise RequestRefused({self._sample.key: answer.error or ""})
        segment = replace(answer.segment, loss_mask=answer.segment.loss_mask.copy())  # not that of the record
        for array in (segment.ids, segment.log_probs, segment.weight_versions):
            assert array is not None
            array.setflags(write=False)  # user code may change the mask, and nothing else
        return segment

    async def call(self, tool: Tool | str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Call a tool; return its result, a JSON value. `tool`: a `cairn.tool`, or the name of one of `rollout.tools`.

        For a tool with effects, the intent to call it is durable before the call, and the result is durable before it
        is returned. Raises ToolFailed, also where the same call failed before; the code may catch it and report it to
        the policy.
        """
        if isinstance(tool, str):
            tool = _named(self.tools, tool)
        elif not isinstance(tool, Tool):
            name = getattr(tool, "__name__", type(tool).__name__)
            raise TypeError(f"ctx.call takes a tool, but {name} is not one: decorate it with @cairn.tool(kind=…)")
        json_arguments = _as_json({} if arguments is None else dict(arguments))
        record = self._new_record(next_call("c"), CallKind.TOOL, tool.name, _digest(json_arguments), json_arguments)
        has_effects = tool.kind == "effects"
        key = self._key(record.call)

        async def call(record: CallRecord) -> CallRecord:
            uncertain = has_effects and self._recorder.is_orphan(record)
            for _ in range(_MAX_LOSSES):
                with outside_code():
                    result = await self._reconciled(tool, record) if uncertain else NOT_DONE
                if result is not NOT_DONE:
                    return _with_answer(record, result=canonical.to_json(result))
                if has_effects:
                    await self._recorder.intend(record)
                try:
                    waiting.set(self._waits)
                    with outside_code():
                        result = await tool.run(from_json(json_arguments), key)
                    return _with_answer(record, result=canonical.to_json(result))
                except ToolFailed as failed:
                    return _with_answer(record, error=str(failed), reason=failed.reason)
                except ToolLost:
                    if not has_effects:
                        raise
                    uncertain = True
            raise UncertainEffect(
                f"the process of {record.description} was ended {_MAX_LOSSES} times while it was at work"
            )

        answer = await self._recorder.answer(record, call, repeat=tool.kind == "deterministic", durable=has_effects)
        if answer.result is None:
            raise ToolFailed(answer.error or "", Reason(answer.reason or Reason.RAISED))
        return from_json(answer.result)

    async def judge(
        self,
        grader: str | Callable[..., Any],
        response: str,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        """Return a grader's reward of a response; the grader runs once.

        Raises JudgeFailed where the grader raises or returns no finite number, also where the same call failed before.

        Args:
            grader: name of a built-in grader, or a function, plain or coroutine, of `(sample)` or
                `(response, label, metadata)`. It returns a number, or a mapping with the number under `reward`. A
                function of `(sample)` receives a `cairn.Sample` with label, metadata, response and prompt.
            label: by default the sample's.
            metadata: by default the sample's.
        """
        function = REWARD.load(grader) if isinstance(grader, str) else grader
        name = grader if isinstance(grader, str) else getattr(grader, "__name__", type(grader).__name__)
        words = {
            "response": response,
            "label": self._sample.label if label is None else label,
            "metadata": dict(self._sample.metadata if metadata is None else metadata),
        }
        json_arguments = _as_json(words)
        record = self._new_record(next_call("j"), CallKind.JUDGE, name, _digest(json_arguments), json_arguments)

        async def judge(record: CallRecord) -> CallRecord:
            taken = self._grader_arguments(name, function, words)
            try:
                with outside_code():
                    result = await result_of(function, *taken)
            except Exception as error:
                return _with_answer(record, error=str(raised(name, error)))
            reward = result.get("reward") if isinstance(result, Mapping) else result
            if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
                shown = shortened(repr(result), 200)
                problem = f"{name}: the grader returned {shown}; ctx.judge needs a finite number"
                return _with_answer(record, error=problem)
            return _with_answer(record, result=repr(float(reward)))

        answer = await self._recorder.answer(record, judge)
        if answer.result is None:
            raise JudgeFailed(answer.error or "")
        return float(answer.result)

    def _grader_arguments(self, name: str, function: Callable[..., Any], words: dict[str, Any]) -> tuple[Any, ...]:
        """Return the positional arguments of a grader."""
        parameters = REWARD.signatures_of(name, function)[0]
        if parameters == ("sample",):
            sample = load_callable("cairn.tasks.rewards.sample.Sample")
            return (sample(**words, prompt=self._sample.prompt, prompt_ids=tuple(self._sample.prompt_ids)),)
        if len(parameters) != len(words):
            taken = ", ".join(parameters)
            raise BadPlugin(f"the grader {name!r} takes {taken}: ctx.judge passes one response at a time")
        return tuple(words.values())

    def _new_record(
        self, call: str, kind: CallKind, name: str, digest: str, arguments: str | None = None, tokens: int = 0
    ) -> CallRecord:
        return CallRecord(
            *self._sample.key,
            call,
            kind,
            name,
            digest,
            turn=len(self._calls),
            arguments=arguments,
            given=tokens,
            started_at=time.time(),
        )

    def _key(self, call: str) -> str:
        """Return the idempotency key of a call with effects, the same in every attempt."""
        origin = self._sample.origin
        run = "" if origin is None else f"{origin.run}/{origin.scope}"
        return "/".join([run, *map(str, self._sample.key), call])

    async def _reconciled(self, tool: Tool, orphan: CallRecord) -> Any:
        """Return the result of a call with effects whose result is not recorded, or NOT_DONE. Raises
        UncertainEffect."""
        origin = self._sample.origin
        if tool.reconcile is not None:
            intent = Intent(
                run="" if origin is None else origin.run,
                iteration=0 if origin is None else origin.iteration,
                group=orphan.group_id,
                sample=orphan.index,
                attempt="" if origin is None else origin.attempt,
                turn=orphan.turn,
                call=orphan.call,
                tool=tool.name,
                arguments=from_json(orphan.arguments or "{}"),
                key=self._key(orphan.call),
            )
            try:
                result = await result_of(tool.reconcile, intent)
                return result if result is NOT_DONE else json_value(tool.name, result, tool.max_output)
            except Exception as error:
                raise UncertainEffect(
                    f"{orphan.description} was under way when its process was lost, and its `reconcile` cannot say "
                    f"whether it was done: {raised(tool.name, error)}"
                ) from error
        if tool.takes_key:
            return NOT_DONE
        raise UncertainEffect(
            f"{orphan.description} was under way when its process was lost, and may have been done: give the tool a "
            "`reconcile`, or a parameter `idempotency_key`"
        )

    async def _continued(self, call: str, before: np.ndarray, params: SamplingParams) -> Segment:
        at_prompt = call == FIRST_CALL and (before is self._prompt or np.array_equal(before, self._prompt))
        begun = self._first if at_prompt else None
        if begun is None or begun.finish_reason == FinishReason.ABORT:
            begun = await self._sampled(call, self._sample.prompt_ids if at_prompt else before, params, begun)
            if at_prompt:
                self._first = begun
            if begun.finish_reason == FinishReason.ABORT:
                raise SampleAborted
        return begun

    async def _sampled(
        self, call: str, before: Sequence[int] | np.ndarray, params: SamplingParams, begun: Segment | None
    ) -> Segment:
        seed = call_seed(self._sample.seed, call)
        id = (*self._sample.key, self._count)
        self._count += 1
        cut_at = self._sample.cut_at if call == FIRST_CALL else None
        if cut_at is not None:
            # One more token shows whether the response ended at the bound: for a last token that ends it, engines may
            # report LENGTH or STOP.
            params = replace(params, max_new_tokens=min(params.max_new_tokens, cut_at + 1))
        images = self._sample.images
        if images and not np.array_equal(before[: len(self._prompt)], self._prompt):
            images = ()
        if begun is None or not len(begun):
            request = GenerateRequest(id, before, seed, params, images=images)
        else:
            request = GenerateRequest(id, [*before, *begun.ids], seed, params, len(begun), images)
        segment = Segment.sampled(await self._ask(request), call, seed)
        segment = segment if begun is None else begun.then(segment)
        return segment if cut_at is None or len(segment) <= cut_at else segment.until(cut_at)

    def aborted(self) -> GeneratedSample:
        """Return the aborted sample, with the tokens of its first call."""
        first = () if self._first is None else (self._first,)
        return GeneratedSample(*self._sample.key, Trajectory(first), FinishReason.ABORT)

    def checked(self, returned: object) -> GeneratedSample:
        """Return the sample that `generate` returned, checked. Raises BadTrajectory."""
        return checked_sample(self._sample.key, self._prompt, self._calls, returned)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Any) -> str:
    """Return a value as JSON. Lone surrogates, which no store accepts, are escaped."""
    return storable(canonical.to_json(value))


def _with_answer(record: CallRecord, **answer: Any) -> CallRecord:
    return replace(record, **answer, seconds=max(0.0, time.time() - record.started_at))


async def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a plain function or a coroutine function."""
    result = function(*arguments)
    return await result if isawaitable(result) else result


def _named(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        known = f"use one of {', '.join(tools)}" if tools else "name it in rollout.tools"
        raise ToolUnavailable(f"there is no tool {name!r}: {known}")
    return tools[name]
