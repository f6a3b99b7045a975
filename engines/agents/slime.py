"""Adapter for generate functions written for slime: `async def generate(args, sample, sampling_params)`.

Their requests to `http://{args.sglang_router_ip}:{args.sglang_router_port}/generate` go through a captured session
(`cairn.engines.agents.capture`), so ids, log-probs and seeds come from the record. In the samples that they return,
tokens and loss mask define what is trained on. A `reward` that a sample has is used: see
`cairn.tasks.grading.opening`."""

import asyncio
from abc import ABCMeta
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.configs.slime import Arguments, Status
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory

if TYPE_CHECKING:  # graders import this too, and need no server
    from cairn.engines.agents.capture.protocol import Exchange
    from cairn.engines.agents.capture.session import Session
    from cairn.engines.agents.episodes.context import Context


class _Generating(Arguments):
    """The `args` of a generate function."""

    def __init__(self, ctx: "Context", session: "Session") -> None:
        params = ctx.sampling
        super().__init__(
            {
                "rollout.rollout_temperature": params.temperature,
                "rollout.rollout_top_p": params.top_p,
                "rollout.rollout_top_k": params.top_k,
                "rollout.rollout_max_response_len": params.max_new_tokens,
                "rollout.rollout_stop": list(params.stop),
                "rollout.rollout_stop_token_ids": list(params.stop_token_ids),
                "rollout.rollout_max_context_len": ctx.options.max_context_len,
                "rollout.partial_rollout": False,  # an aborted sample restarts from its prompt
            }
        )
        host, _, rest = session.url.removeprefix("http://").rpartition(":")
        self.sglang_router_ip = host
        self.sglang_router_port = rest
        """Port, followed by the session's name as the path of URLs."""
        self.tokenizer = ctx.tokenizer


@dataclass
class Sample(metaclass=ABCMeta):  # noqa: B024 - the class that graders receive is registered with it
    """slime's `Sample`, as a generate function receives and returns it."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    """Tokens of prompt and response."""
    response: str = ""
    response_length: int = 0
    """Number of response tokens."""
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """Loss mask of the response tokens; None trains on all sampled ones."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Append sampled tokens, or tokens of the environment (`trainable=False`)."""
        self.tokens = [*self.tokens, *map(int, tokens)]
        self.response_length += len(tokens)
        self.loss_mask = [*(self.loss_mask or ()), *[int(trainable)] * len(tokens)]
        values = [0.0] * len(tokens) if log_probs is None else list(log_probs)
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *values]
        self.response += text or ""
        if meta_info is not None:
            cut = meta_info["finish_reason"]["type"] == "length"
            self.status = Status.TRUNCATED if cut else Status.COMPLETED
            self.weight_versions.append(meta_info.get("weight_version", ""))

    def get_reward_value(self, args: Any) -> float:
        """Return the reward, or its entry `args.reward_key` where it is a mapping."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward  # type: ignore[return-value]


Sample.Status = Status  # type: ignore[attr-defined]  # as slime's functions name it


class GenerateState:
    """The state from which slime's generate functions take their tokenizer."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(1024)
        self.aborted = False


def get_model_url(args: Any, model_name: str = "", endpoint: str = "/generate") -> str:
    """Return the URL of the policy."""
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

    async def generate(ctx: "Context", sample: SampleRequest) -> list[Trajectory]:
        replayable = bool(getattr(function, "replayable", False))
        async with capture(ctx, sample, replayable=replayable) as session:
            slime_sample = Sample(
                group_index=sample.group_id,
                index=sample.index,
                prompt=sample.prompt,
                label=sample.label,
                metadata=dict(sample.metadata),
            )
            params = ctx.sampling
            sampling_params = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "max_new_tokens": params.max_new_tokens,
                "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                "skip_special_tokens": True,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            }
            returned = await function(_Generating(ctx, session), slime_sample, sampling_params)
        samples = returned if isinstance(returned, list) else [returned]
        used = set[int]()
        return [_trajectory(one, session.exchanges, used) for one in samples]

    return generate


def _trajectory(sample: Any, exchanges: "Sequence[Exchange]", used: set[int]) -> Trajectory:
    """Return the trajectory of a slime sample.

    Raises ValueError where it trains on tokens that were not sampled after the tokens before them, or its reward is not
    a number.

    Args:
        used: indices of exchanges that earlier samples contain; this sample's are added. Among exchanges with the same
            tokens it takes one that no other sample has.
    """
    status = getattr(sample.status, "value", sample.status)
    if status in (Status.ABORTED.value, Status.FAILED.value):
        raise ValueError(f"generate returned a sample whose status is {status}")
    tokens, length = np.asarray(sample.tokens, np.int32), int(sample.response_length)
    start, segments = len(tokens) - length, list[Segment]()
    mask = np.ones(length, np.uint8) if sample.loss_mask is None else np.asarray(sample.loss_mask, np.uint8)
    if len(mask) != length or start < 1:
        raise ValueError(f"generate returned {len(tokens)} tokens, {length} in the response, {len(mask)} in loss_mask")
    mask = mask * (not sample.remove_sample)
    end = start
    for number in sorted(range(len(exchanges)), key=lambda number: (len(exchanges[number].prompt_ids), number in used)):
        one = exchanges[number]
        place, after = len(one.prompt_ids), len(one.ids)
        if place < end or not one.is_before(tokens):
            continue
        used.add(number)
        segments += _environment_segment(tokens[end:place], mask[end - start : place - start])
        segments.append(replace(one.segment, loss_mask=mask[place - start : after - start]))
        end = after
    segments += _environment_segment(tokens[end:], mask[end - start :])
    if isinstance(sample.reward, Mapping):
        raise ValueError("generate returned a sample whose reward is a mapping: set the number alone, or None")
    return Trajectory(segments, tokens[:start], reward=None if sample.reward is None else float(sample.reward))


def _environment_segment(ids: np.ndarray, mask: np.ndarray) -> list[Segment]:
    if mask.any():
        raise ValueError(
            "generate returned a loss_mask that trains on tokens that the policy did not sample in this context: keep "
            "all output_ids of /generate after the input of that request"
        )
    return [Segment.given(ids)] if len(ids) else []
