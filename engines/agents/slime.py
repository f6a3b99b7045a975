"""Adapter for generate functions written for slime.

| signature | it |
|---|---|
| `generate(args, sample, sampling_params)`, with or without `evaluation` | returns the sample, or several |
| `custom_generate(args, samples, evaluation=False)` | gets a list of one sample, and returns a list |

Their requests to `http://{args.sglang_router_ip}:{args.sglang_router_port}` go through a captured session
(`cairn.engines.agents.capture`), so ids, log-probs and seeds come from the record. In the samples that they return,
tokens and loss mask define what is trained on. A `reward` that a sample has is used: see
`cairn.tasks.grading.opening`. What else they write into it, the grader finds in its sample."""

import asyncio
import copy
import inspect
import json
from abc import ABCMeta
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.configs.kinds import GENERATE
from cairn.configs.slime import Arguments, Status, as_in_row
from cairn.engines.types.trajectories import BadTrajectory, SampleRequest, Segment, Trajectory
from cairn.storage.store.canonical import from_json

if TYPE_CHECKING:  # graders import this too, and need no server
    from cairn.engines.agents.capture.protocol import ChatTemplate, Exchange
    from cairn.engines.agents.capture.session import Session
    from cairn.engines.agents.episodes.context import Context


class _Generating(Arguments):
    """The `args` of a generate function."""

    def __init__(self, ctx: "Context", session: "Session") -> None:
        params = ctx.sampling
        super().__init__(
            {
                **ctx.options.args,
                "rollout_temperature": params.temperature,
                "rollout_top_p": params.top_p,
                "rollout_top_k": params.top_k,
                "rollout_max_response_len": params.max_new_tokens,
                "rollout_stop": list(params.stop),
                "rollout_stop_token_ids": list(params.stop_token_ids),
                "rollout_max_context_len": ctx.options.max_context_len,
                "partial_rollout": False,  # an aborted sample restarts from its prompt
            }
        )
        host, _, rest = session.url.removeprefix("http://").rpartition(":")
        self.sglang_router_ip = host
        self.sglang_router_port = rest
        """Port, followed by the session's name as the path of URLs."""
        self.tokenizer = ctx.tokenizer


@dataclass
class Sample(metaclass=ABCMeta):  # noqa: B024 - the class that graders receive is registered with it
    """slime's `Sample`, as a generate function receives and returns it. Further attributes may be set."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Tokens of prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """Number of response tokens."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """Loss mask of the response tokens; None trains on all sampled ones."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: list[Any] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append sampled tokens, or tokens of the environment (`trainable=False`), to the lists that the sample has."""
        added = [*map(int, tokens or ())]
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens += added
        self.response_length += len(added)
        self.loss_mask += [int(trainable)] * len(added)
        self.rollout_log_probs += [0.0] * len(added) if log_probs is None else map(float, log_probs)
        self.response += text or ""
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            endings = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
            self.status = endings.get(meta_info["finish_reason"]["type"], self.status)
            self.weight_versions.append(meta_info.get("weight_version", ""))

    def get_reward_value(self, args: Any) -> float:
        """Return the reward, or its entry `args.reward_key` where it is a mapping."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, with the status as text."""
        return {**vars(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Sample":
        """Return the sample with the attributes of `to_dict`."""
        sample = cls()
        vars(sample).update(data, status=Status(data["status"]))
        return sample


Sample.Status = Status  # type: ignore[attr-defined]  # as slime's functions name it


class GenerateState:
    """The state from which slime's generate functions take their tokenizer."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
        }
        self.semaphore = asyncio.Semaphore(1024)
        self.aborted = False


def get_model_url(args: Any, model_name: str = "", endpoint: str = "/generate") -> str:
    """Return the URL of the policy. Raises ValueError for another model: only the policy is served here."""
    if model_name not in ("", "actor", "default", "policy"):
        raise ValueError(f"no model {model_name!r} is served: only the policy is, as 'actor'; write its URL yourself")
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Return the response to a JSON request. Raises RuntimeError with the message of a server that reports an error."""
    from aiohttp import ClientSession, ClientTimeout

    async with (
        ClientSession(timeout=ClientTimeout(total=None)) as client,
        client.post(url, json=payload, headers=headers) as response,
    ):
        if response.status >= 400:
            raise RuntimeError(f"{response.status}: {(await response.text())[:500]}")
        return await response.json()


def adapted(
    function: Callable[..., Any],
) -> "Callable[[Context, SampleRequest], Awaitable[list[Trajectory]]]":
    """Convert a generate function of slime. It may run again after a crash if its attribute `replayable` is true."""

    from cairn.engines.agents.capture.server import capture

    (names, *_) = GENERATE.signatures_of(str(getattr(function, "__name__", "generate")), function)
    wants_evaluation = "evaluation" in inspect.signature(function).parameters

    async def generate(ctx: "Context", sample: SampleRequest) -> list[Trajectory]:
        replayable = bool(getattr(function, "replayable", False))
        async with capture(ctx, sample, replayable=replayable) as session:
            slime_sample = Sample(
                group_index=sample.group_id,
                index=sample.index,
                prompt=as_in_row(sample.prompt, "[{"),
                label=as_in_row(sample.label),
                metadata=copy.deepcopy(sample.metadata),
            )
            args = _Generating(ctx, session)
            given = {
                "args": args,
                "sample": slime_sample,
                "samples": [slime_sample],
                "sampling_params": {
                    **GenerateState(args).sampling_params,
                    "stop": [*args.rollout_stop],
                    "stop_token_ids": [*args.rollout_stop_token_ids],
                    "skip_special_tokens": True,
                    "no_stop_trim": True,
                    "spaces_between_special_tokens": False,
                },
            }
            is_evaluation = bool(sample.origin and sample.origin.scope)
            more = {"evaluation": is_evaluation} if wants_evaluation else {}
            returned = await function(*(given[name] for name in names if name != "evaluation"), **more)
            if returned is None:  # it has changed the sample that it got
                returned = slime_sample
            session.trajectories()  # raises where there was no request
            record = _Record(session.exchanges, session.template, ctx.options.args.get("reward_key"))
        samples = returned if isinstance(returned, list | tuple) else [returned]
        return [record.trajectory(one, sample) for one in samples]

    return generate


class _Record:
    """The exchanges of a session, and the trajectories that returned samples make of them."""

    def __init__(self, exchanges: "Sequence[Exchange]", template: "ChatTemplate", reward_key: str | None) -> None:
        self._exchanges = exchanges
        self._template = template
        self._reward_key = reward_key
        self._trained = set[str | None]()
        """Calls that earlier samples are trained on."""

    def trajectory(self, sample: Any, request: SampleRequest) -> Trajectory:
        """Return the trajectory of a slime sample.

        | its tokens | are |
        |---|---|
        | tokens that were sampled after the tokens before them | trained on, as `loss_mask` says |
        | text of the record in other tokens, or no tokens | replaced by those of the record |
        | other tokens with a `loss_mask` of 1 | not trained on, and counted as `retold` |

        Where nothing of a sample was sampled so, it has the last exchanges of the record. Raises ValueError where the
        sample is aborted or failed, or its reward is a mapping without `reward_key`.
        """
        if not hasattr(sample, "tokens") or not hasattr(sample, "response_length"):
            raise BadTrajectory(f"generate returned {type(sample).__name__} for a sample; return its samples in a list")
        status = getattr(sample.status, "value", sample.status)
        if status in (Status.ABORTED.value, Status.FAILED.value):
            raise ValueError(f"generate returned a sample whose status is {status}")
        tokens = _integers(sample.tokens, "tokens", 2**31 - 1)
        length = int(_integers([sample.response_length], "response_length", 2**31 - 1)[0]) if len(tokens) else 0
        given = sample.loss_mask
        mask = np.ones(length, np.uint8) if given is None else _integers(given, "loss_mask", 1).astype(np.uint8)
        if length and (len(mask) != length or len(tokens) <= length):
            raise ValueError(
                f"generate returned {len(tokens)} tokens, {length} in the response, {len(mask)} in loss_mask"
            )
        exact = self._exact(tokens, mask) if length else None
        found = exact or self._last()
        if exact is None or exact.retold:
            by_text = self._by_text(sample, tokens, mask)
            if by_text is not None and (exact is None or by_text.loss_mask.sum() >= exact.loss_mask.sum()):
                found = by_text
        if sample.remove_sample:
            segments = [replace(one, loss_mask=0 * one.loss_mask) for one in found.segments]
            found = replace(found, segments=segments)
        self._trained |= {one.call for one in found.segments if one.loss_mask.any()}
        return replace(
            found,
            reward=self._reward(sample),
            truncated=status == Status.TRUNCATED.value,
            info=_info(sample, request, self._template.text(found.response_ids, skips=True)),
        )

    def _exact(self, tokens: np.ndarray, mask: np.ndarray) -> Trajectory | None:
        """Return the trajectory of tokens, with the exchanges that they contain; None where they contain none."""
        start = end = len(tokens) - len(mask)
        segments, retold = list[Segment](), 0

        def given(until: int) -> None:
            nonlocal retold
            if until > end:
                segments.append(Segment.given(tokens[end:until]))
                retold += int(mask[end - start : until - start].sum())

        for one in sorted(self._exchanges, key=lambda one: (len(one.prompt_ids), not self._is_free(one))):
            place, after = len(one.prompt_ids), len(one.ids)
            if place < end or not one.is_before(tokens):
                continue
            given(place)
            segments.append(self._segment(one, mask[place - start : after - start]))
            end = after
        given(len(tokens))
        sampled = any(one.call is not None for one in segments)
        return Trajectory(segments, tokens[:start], retold=retold) if sampled else None

    def _by_text(self, sample: Any, tokens: np.ndarray, mask: np.ndarray) -> Trajectory | None:
        """Return the trajectory of the exchanges whose text a sample begins with; None where there are none."""
        text = partial(self._template.text, skips=True)
        if not len(tokens):
            said = str(sample.response).strip()
            fitting = [one for one in self._exchanges if said and text(one.segment.ids).strip() == said]
            return self._chain(self._newest(fitting), None) if fitting else None
        whole, start = text(tokens), len(tokens) - len(mask)
        fitting = [one for one in self._exchanges if whole.startswith(text(one.ids))]
        if not fitting:
            return None
        runs = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
        trained = [text(tokens[start + run]).strip() for run in runs if mask[run[0]]]
        last = max(fitting, key=lambda one: (len(text(one.ids)), self._is_free(one)))
        found, chain = self._chain(last, trained), last.chain
        # What was sampled too, and is in the sample in other tokens.
        others = [one for one in self._exchanges if one not in chain and whole.startswith(text(one.prompt_ids))]
        prompt = next((one.prompt_ids for one in others if text(one.prompt_ids) == text(tokens[:start])), None)
        segments, rest = [*found.segments], whole[len(text(last.ids)) :]
        if prompt is not None and _begins(chain[0].prompt_ids, prompt) and len(chain[0].prompt_ids) > len(prompt):
            segments.insert(0, Segment.given(chain[0].prompt_ids[len(prompt) :]))
        else:
            prompt = chain[0].prompt_ids
        if rest.strip():
            segments.append(Segment.given(self._template.ids(rest)))
        return Trajectory(segments, prompt, retold=sum(len(one.segment) for one in others if self._is_free(one)))

    def _last(self) -> Trajectory:
        """Return the trajectory of the last exchanges, for a sample that contains none of them."""
        found = self._chain(self._newest(self._exchanges), None)
        return replace(found, retold=sum(len(one) for one in found.segments if one.call is not None))

    def _newest(self, exchanges: "Sequence[Exchange]") -> "Exchange":
        """Return the last exchange, of those that no earlier sample is trained on if there are any."""
        return ([one for one in exchanges if self._is_free(one)] or exchanges)[-1]

    def _chain(self, last: "Exchange", trained: Sequence[str] | None) -> Trajectory:
        """Return the trajectory of an exchange and those that it continues. `trained`: texts that are trained on; None
        for all."""
        chain, segments = last.chain, list[Segment]()
        end = len(chain[0].prompt_ids)
        for one in chain:
            if len(one.prompt_ids) > end:
                segments.append(Segment.given(one.prompt_ids[end:]))
            said = self._template.text(one.segment.ids, skips=True).strip()
            counts = trained is None or any(said in other or other in said for other in trained)
            segments.append(self._segment(one, np.full(len(one.segment), counts, np.uint8)))
            end = len(one.ids)
        return Trajectory(segments, chain[0].prompt_ids)

    def _segment(self, one: "Exchange", mask: np.ndarray) -> Segment:
        """Return the segment of an exchange; without a loss in all samples but the first that contains it."""
        return replace(one.segment, loss_mask=mask * self._is_free(one))

    def _is_free(self, one: "Exchange") -> bool:
        return one.segment.call not in self._trained

    def _reward(self, sample: Any) -> float | None:
        reward = sample.reward
        if isinstance(reward, Mapping):
            if self._reward_key not in reward:
                raise ValueError("generate returned a sample whose reward is a mapping: set reward.reward_key")
            reward = reward[self._reward_key]
        try:
            return None if reward is None else float(reward)
        except (TypeError, ValueError, OverflowError):
            kind = type(reward).__name__
            raise ValueError(f"generate returned a sample whose reward is no number: it is {kind}") from None


def _integers(values: Any, name: str, largest: int) -> np.ndarray:
    """Return the whole numbers from 0 to `largest` of a sample's field. Raises ValueError for anything else."""
    try:
        found = np.asarray(values)
        whole = found.astype(np.int32)
        same = (found == whole) & (found >= 0) & (found <= largest)
        if found.ndim == 1 and found.dtype.kind in "biuf" and same.all():
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"generate returned a sample whose {name} has other values than whole numbers up to {largest}")


def _begins(tokens: np.ndarray, start: np.ndarray) -> bool:
    return len(tokens) >= len(start) and bool(np.array_equal(tokens[: len(start)], start))


_FIELDS = frozenset(one.name for one in fields(Sample)) - {"prompt", "response", "label", "metadata"}
"""Fields that a grader gets from elsewhere, or not at all."""


def _info(sample: Any, request: SampleRequest, text: str) -> dict[str, Any] | None:
    """Return what a function wrote into its sample for the grader: text and data that differ from the record's, and
    attributes of its own that are JSON values."""
    known = {
        "prompt": as_in_row(request.prompt, "[{"),
        "label": as_in_row(request.label),
        "metadata": request.metadata,
        "response": text,
    }
    written = {}
    for name, value in getattr(sample, "__dict__", {}).items():
        if name in _FIELDS or name.startswith("_") or (name in known and value == known[name]):
            continue
        try:
            written[name] = from_json(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            continue
    return written or None
