"""Rewards by `--rm-type`: Cairn's graders of the same names."""

import asyncio
from collections.abc import Sequence
from inspect import isawaitable
from pkgutil import extend_path
from typing import Any

from cairn.configs.kinds import REWARD
from cairn.configs.plugins import load_callable
from cairn.engines.agents.slime import post
from cairn.slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from cairn.slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from cairn.slime.rollout.rm_hub.math_utils import grade_answer_verl
from cairn.tasks.rewards.boxed import in_box
from cairn.tasks.rewards.grader import BOXED
from cairn.tasks.rewards.sample import Sample

__path__ = extend_path(__path__, __name__)
__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_score_dapo",
    "extract_boxed_answer",
    "grade_answer_verl",
    "remote_rm",
]


async def remote_rm(args: Any, sample: Any, max_retries: int = 10) -> Any:
    """Return the response of the service `args.rm_url`."""
    return await post(args.rm_url, {"prompt": sample.prompt, "response": sample.response, "label": sample.label})


async def async_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Return the reward of a sample, by `args.custom_rm_path`, or by the grader of its row or of `args.rm_type`."""
    if args.custom_rm_path is not None:
        found = load_callable(args.custom_rm_path)(args, sample, **kwargs)
        return await found if isawaitable(found) else found
    name = ((sample.metadata or {}).get("rm_type") or args.rm_type or "").strip()
    if name == "remote_rm":
        return await remote_rm(args, sample)
    graded = Sample(sample.response, sample.label, dict(sample.metadata or {}), prompt=str(sample.prompt))
    if name.startswith(BOXED):
        graded, name = in_box(graded), name.removeprefix(BOXED)
    return REWARD.load(name)(graded)


async def batched_async_rm(args: Any, samples: Sequence[Any], **kwargs: Any) -> list[Any]:
    """Return the rewards of samples, in their order."""
    if args.custom_rm_path is not None:
        found = load_callable(args.custom_rm_path)(args, samples, **kwargs)
        return list(await found if isawaitable(found) else found)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
