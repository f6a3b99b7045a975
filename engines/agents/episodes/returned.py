"""Validation of what `generate` returns against the calls of the policy."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from cairn.engines.types.trajectories import BadTrajectory, GeneratedSample, Segment, Trajectory
from cairn.engines.types.types import FinishReason
from cairn.storage.store.canonical import from_json

# Rewards and roles that user code assigns to trajectories and segments.


def checked_reward(reward: object, of: str) -> float | None:
    """Return a reward of a segment or a trajectory.

    Raises BadTrajectory for what is not a number. Raises ValueError, which fails the sample, for a number that is not
    finite: it may come from the environment.
    """
    if reward is None:
        return None
    if not isinstance(reward, np.bool_ | Real):
        raise BadTrajectory(f"generate gave {of} the reward {reward!r}; it has to be a number")
    if not isfinite(reward):
        raise ValueError(f"gave {of} the reward {reward}, which is not finite")
    return float(reward)


def reward_of(trajectory: Trajectory, segments: Sequence[Segment]) -> float | None:
    """Return the reward of a trajectory: its own, or else the sum of its checked segments' rewards.

    Raises the errors of `checked_reward`.
    """
    turns = [segment.reward for segment in segments if segment.reward is not None]
    return (
        checked_reward(trajectory.reward, "a trajectory") if trajectory.reward is not None or not turns else sum(turns)
    )


def checked_role(role: object) -> str | None:
    """Return the role of a trajectory. Raises BadTrajectory for what is not one word."""
    if role is None or (isinstance(role, str) and re.fullmatch(r"[\w.-]+", role)):
        return role
    raise BadTrajectory(f"generate gave a trajectory the role {role!r}; it has to be a word, such as 'solver'")


def checked_info(info: object) -> dict[str, Any] | None:
    """Return the values of a trajectory for the grader. Raises BadTrajectory for what is not a mapping of JSON
    values."""
    if info is None:
        return None
    try:
        read = from_json(json.dumps(info))
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise BadTrajectory(f"generate gave a trajectory the info {info!r}; it has to be a mapping of JSON values")
    return read


@dataclass(frozen=True)
class Continuation:
    """A finished call of `ctx.sample`: its input tokens and the sampled segment."""

    before: np.ndarray
    segment: Segment


def checked_sample(
    key: tuple[int, int], prompt: np.ndarray, calls: Mapping[str, Continuation], returned: object
) -> GeneratedSample:
    """Return the sample `key` with the segments that the policy sampled in its calls.

    User code decides the order of segments and what is trained on. Raises BadTrajectory where inputs or segments differ
    from those of the calls.
    """
    trajectories = list(returned) if isinstance(returned, list | tuple) else [returned]
    several = len(trajectories) > 1
    prompts, parts = list[np.ndarray | None](), list[list[Segment]]()
    rewards, roles, infos = list[float | None](), list[str | None](), list[dict[str, Any] | None]()
    for number, one in enumerate(trajectories, 1):
        if isinstance(one, Trajectory):
            where = f" of trajectory {number}" if several else ""
            prompts.append(_own_prompt(one, prompt, where))
            before = prompt if prompts[-1] is None else prompts[-1]
            parts.append(_segments(one, before, calls, where))
            rewards.append(reward_of(one, parts[-1]))
            roles.append(checked_role(one.role))
            infos.append(checked_info(one.info))
    if not parts or len(parts) < len(trajectories):
        other = next((type(one).__name__ for one in trajectories if not isinstance(one, Trajectory)), None)
        kind = "an empty list" if other is None else f"a list with {other}" if several else other
        raise BadTrajectory(f"generate returned {kind} for a sample; return a cairn.Trajectory, or a list of them")
    segments = [segment for part in parts for segment in part]
    if several:
        _check_trained_once(segments)
    reasons = [segment.finish_reason for segment in segments if segment.finish_reason is not None]
    own = any(one is not None for one in prompts)
    cut = any(one.truncated for one in trajectories if isinstance(one, Trajectory))
    return GeneratedSample(
        *key,
        Trajectory(segments),
        FinishReason.LENGTH if cut else reasons[-1],
        lengths=tuple(sum(map(len, part)) for part in parts) if several or own else None,
        prompts=tuple(prompts) if own else None,
        rewards=None if all(reward is None for reward in rewards) else tuple(rewards),
        roles=None if all(role is None for role in roles) else tuple(roles),
        retold=sum(one.retold for one in trajectories if isinstance(one, Trajectory)),
        infos=tuple(infos) if any(infos) else None,
    )


def _own_prompt(trajectory: Trajectory, prompt: np.ndarray, where: str) -> np.ndarray | None:
    """Return the prompt of a trajectory, None where it is the sample's. `where` names the trajectory among several."""
    if trajectory.prompt_ids is None:
        return None
    own = np.asarray(trajectory.prompt_ids, np.int32)
    if own.ndim != 1 or not len(own):
        raise BadTrajectory(f"the prompt_ids{where} that generate returned have to be one list with a token")
    return None if np.array_equal(own, prompt) else own


def _segments(
    trajectory: Trajectory, before: np.ndarray, calls: Mapping[str, Continuation], where: str
) -> list[Segment]:
    """Return the checked segments of a trajectory that begins after the tokens `before`."""
    segments = list[Segment]()
    for number, segment in enumerate(trajectory.segments, 1):
        if segments:
            before = np.concatenate([before, segments[-1].ids])
        try:
            segments.append(_checked(segment, before, calls))
        except BadTrajectory as problem:
            raise BadTrajectory(f"segment {number}{where} that generate returned {problem}") from None
    if not any(segment.call is not None and len(segment) for segment in segments):
        raise BadTrajectory("generate returned a trajectory without a sampled token; if there is none, raise an error")
    return segments


def _checked(segment: object, before: np.ndarray, calls: Mapping[str, Continuation]) -> Segment:
    if not isinstance(segment, Segment):
        raise BadTrajectory(f"is of type {type(segment).__name__}; it has to be a cairn.Segment")
    mask = np.asarray(segment.loss_mask)
    if np.ndim(segment.ids) != 1:
        raise BadTrajectory(f"has ids of {np.ndim(segment.ids)} dimensions; they have to be one list")
    if mask.shape != (len(segment),):
        problem = f"has a loss_mask of {len(mask) if mask.ndim else 'one value'} for {len(segment)} tokens"
        raise BadTrajectory(f"{problem}; it needs one value per token")
    if not ((mask == 0) | (mask == 1)).all():
        raise BadTrajectory("has a loss_mask with other values than 0 and 1")
    if segment.call is None:
        if mask.any():
            raise BadTrajectory("trains on tokens that were not sampled; their loss_mask has to be 0")
        if segment.reward is not None:
            raise BadTrajectory("has a reward, but was not sampled; set it on the sampled segment before")
        return Segment.given(segment.ids)
    call = calls.get(segment.call)
    if call is None or not (call.segment is segment or np.array_equal(call.segment.ids, segment.ids)):
        raise BadTrajectory(
            f"has other ids than call {segment.call} of ctx.sample returned; use that segment unchanged"
        )
    if call.before is not before and not np.array_equal(call.before, before):
        raise BadTrajectory(
            f"was sampled after {len(call.before)} tokens that differ from the {len(before)} before it in the "
            "trajectory; use the input of ctx.sample there"
        )
    if call.segment is segment:
        return segment
    reward = checked_reward(segment.reward, "a segment")
    return replace(call.segment, loss_mask=mask.astype(np.uint8), reward=reward)


def _check_trained_once(segments: Sequence[Segment]) -> None:
    """Raise BadTrajectory where two trajectories train on the same sampled token; they may share it otherwise."""
    trained: dict[str, np.ndarray] = {}
    for segment in segments:
        if segment.call is None:
            continue
        mask, earlier = segment.loss_mask.astype(bool), trained.get(segment.call)
        if earlier is not None and (earlier & mask).any():
            raise BadTrajectory(
                f"generate returned call {segment.call} of ctx.sample in two trajectories, and its loss_mask trains on "
                "the same tokens in both; set it to 0 in one of them"
            )
        trained[segment.call] = mask if earlier is None else earlier | mask
