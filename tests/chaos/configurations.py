"""What runs are configured as that are struck: the sections that differ from `runs.chaos_config`.

configuration   what recovery must bring back there, beside weights
plain           nothing
short           nothing; half the work of `plain`, for kills by the hundred
filtered        the buffer of surplus groups, the data cursor after refills, rounds of a batch that is not full
partial         groups that were aborted unfinished, with their tokens
cut             the same, cut off by tokens, which come out the same again
retained        the run from what retention keeps
critic          a second model and its optimizer
ranks           two ranks of PyTorch, each with its part of the state
tensor          two ranks of Megatron with half of every layer each
hung, hung-tensor  the same, with a minute for each collective
joined          engines that outlive their driver, on a cluster that somebody else started
long            the same over more iterations, for kills by the hundred
fork            weights that only the parent's configuration makes, where the parent has no checkpoint
streaming       samples of open groups, and which a batch was made of
joined-streaming  `joined` and `streaming` at once, with longer responses, which meet new weights
lagged          two open iterations, one collected while the other is learned from, and older weights
single          one engine, whose deaths all strike the same groups
mixed           `filtered`, `retained` and `critic` at once
joined-partial  `joined` and `partial` at once
sglang          servers behind a router
sglang-partial  the same with groups that were aborted unfinished
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.configs.schema.run import RunConfig
from tests.chaos.runs import chaos_config

Sections = Mapping[str, Mapping[str, Any]]

GRADER = '''
"""Rewards low digits, and takes its time: a grader that is killed is killed at work."""

import time
import zlib


def grade(response, label, metadata):
    time.sleep(0.004)
    return sum(ord(char) % 3 for char in response) / (3 * len(response) + 1)


def coarse(response, label, metadata):
    """Two rewards, of which a third of the groups has but one, whatever the policy learns."""
    time.sleep(0.004)
    return float(zlib.crc32(response.encode()) % 4 == 0)
'''

_LESS: Sections = {"rollout": {"rollout_batch_size": 2}, "eval": {"benchmarks": [], "eval_interval": None}}
_OVER = {"rollout_batch_size": 4, "over_sampling_batch_size": 7}
_PARTIAL = {**_OVER, "partial_rollout": True, "max_age": 1, "rollout_max_response_len": 24}
_CUT = {"cut_tokens": 6, "n_samples_per_prompt": 2, "rollout_stop_token_ids": [*range(3, 40)]}
_SGLANG = {
    "engine": "sglang",
    "rollout_batch_size": 8,
    "rollout_max_response_len": 48,
    "max_running_requests": 4,
    "sglang": {"max_total_tokens": 4096},
    "router": {"policy": "round_robin"},
    "rollout_health_check_interval": 1,
    "rollout_health_check_timeout": 10,
}
_FILTERED: Sections = {
    "rollout": {**_OVER, "dynamic_sampling_filter": "check_reward_nonzero_std"},
    "reward": {"custom_rm_path": "coarse"},
}
_RETAINED: Sections = {"checkpoint": {"save_interval": 1, "save_retain_interval": 2, "retain_snapshots": 2}}
_CRITIC: Sections = {"algorithm": {"advantage_estimator": "ppo", "use_kl_loss": False, "kl_loss_coef": 0.0}}
_TIS = {"use_rollout_logprobs": False, "use_tis": True}
_STREAMING: Sections = {"rollout": {"pipeline": "streaming"}, "algorithm": _TIS}
_TENSOR = {"tensor_model_parallel_size": 2}
_MINUTE = {"distributed_timeout_minutes": 1}


@dataclass(frozen=True)
class Origin:
    """What a run is forked from."""

    configuration: str
    iteration: int
    overrides: Sequence[str]


@dataclass(frozen=True)
class Configuration:
    """One of the above."""

    sections: Sections = field(default_factory=dict)
    repeatable: bool = True
    """Whether rollouts come out the same when they are done again: then there is an undisturbed run to be equal to."""
    joined: bool = False
    """Whether its drivers join a cluster that outlives them."""
    forked_from: Origin | None = None
    """An undisturbed run, which it goes on from with other options."""


CONFIGURATIONS: Mapping[str, Configuration] = {
    "plain": Configuration(),
    "short": Configuration(_LESS),
    "filtered": Configuration(_FILTERED),
    "partial": Configuration({"rollout": _PARTIAL}, repeatable=False),
    "cut": Configuration({"rollout": {**_PARTIAL, **_CUT}}),
    "retained": Configuration(_RETAINED),
    "critic": Configuration(_CRITIC),
    "mixed": Configuration({**_FILTERED, **_RETAINED, **_CRITIC}),
    "ranks": Configuration({"training": {"world_size": 2}}),
    "tensor": Configuration({"training": {"engine": "megatron", "world_size": 2, "megatron": _TENSOR}}),
    "hung": Configuration({"training": {"world_size": 2, **_MINUTE}}),
    "hung-tensor": Configuration({"training": {"engine": "megatron", "world_size": 2, "megatron": _TENSOR, **_MINUTE}}),
    "fork": Configuration(forked_from=Origin("plain", 2, ["training.lr=5.0e-4", "rollout.num_rollout=6"])),
    "joined-partial": Configuration({"rollout": _PARTIAL}, repeatable=False, joined=True),
    "joined": Configuration(joined=True),
    "long": Configuration(
        {**_LESS, "rollout": {**_LESS["rollout"], "num_rollout": 16}, "checkpoint": {"save_interval": 4}}, joined=True
    ),
    "streaming": Configuration(_STREAMING, repeatable=False),
    "joined-streaming": Configuration(
        {
            **_STREAMING,
            "rollout": {**_STREAMING["rollout"], "num_rollout": 5, "rollout_max_response_len": 192},
            "eval": {"eval_interval": 4},  # one interrupts what is generated, and is due when weights are published
        },
        repeatable=False,
        joined=True,
    ),
    "lagged": Configuration({"rollout": {"pipeline": "lagged"}, "algorithm": _TIS}),
    "single": Configuration({"rollout": {"num_engines": 1}}),
    "sglang": Configuration({"rollout": _SGLANG, "fleet": {"call_timeout": 60}}, repeatable=False),
    "sglang-partial": Configuration(
        {"rollout": {**_SGLANG, **_PARTIAL, "rollout_max_response_len": 48}, "fleet": {"call_timeout": 60}},
        repeatable=False,
    ),
}


def write_config(
    name: str, assets: Path, folder: Path, graders: Path | None = None, ray_address: str | None = None
) -> Path:
    """The file of a configuration in a folder; `graders` is where the grader's source goes, by default there too."""
    configuration = CONFIGURATIONS[name]
    grader = (graders or folder) / "chaos_grader.py"
    if not grader.exists():
        grader.write_text(GRADER)
    whole = chaos_config(assets).model_dump(mode="json")
    whole["reward"]["custom_rm_path"] = "grade"
    for section, options in configuration.sections.items():
        whole[section] |= options
    whole["reward"]["custom_rm_path"] = f"{grader}:{whole['reward']['custom_rm_path']}"
    if configuration.joined:
        whole["fleet"]["ray_address"] = ray_address
    file = folder / f"{name}.json"
    file.write_text(RunConfig.model_validate(whole).model_dump_json())
    return file
