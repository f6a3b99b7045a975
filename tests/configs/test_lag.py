"""Which options a lag needs, and which it does not go with."""

import re
from typing import Any

import pytest

from cairn.configs.loader import parse
from tests.mistakes import said

LAGGED = {"pipeline": "lagged"}


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    rollout = {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4}
    values = {"model": {"path": "m"}, "data": {"path": "d"}, **sections}
    return {**values, "rollout": {**rollout, **sections.get("rollout", {})}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rollout": LAGGED}, "rollout.lag is 1: tokens that older weights sampled are trained on, and nothing"),
        ({"rollout": {"lag": 2}}, r"lag \(2\) has no effect while rollout.pipeline is sync"),
        ({"rollout": {**LAGGED, "lag": 2, "max_age": 1}}, r"max_age \(1\) is below the lag \(2\)"),
        ({"rollout": LAGGED, "algorithm": {"use_tis": True}, "fleet": {"colocate": True}}, "with fleet.colocate only"),
        ({"rollout": LAGGED, "algorithm": {"use_tis": True}, "fleet": {"offload_train": True}}, "fleet.offload_train"),
    ],
)
def test_what_a_lag_does_not_go_with_is_said_in_a_sentence(sections: dict[str, Any], says: str) -> None:
    (sentence,) = said(lambda note: parse(config(**sections), note=note))
    assert re.search(says, sentence)


def test_a_lag_bounds_the_age_of_tokens_unless_more_is_allowed() -> None:
    corrected = {"use_tis": True}
    assert parse(config()).rollout.weights_lag == 0
    assert parse(config(rollout=LAGGED, algorithm=corrected)).rollout.oldest_trained == 1
    assert parse(config(rollout={**LAGGED, "lag": 3}, algorithm=corrected)).rollout.oldest_trained == 3


@pytest.mark.parametrize("estimator", ["grpo", "file.py:estimate"])
def test_a_ratio_to_the_policy_that_sampled_corrects_for_a_lag_whoever_estimates_advantages(estimator: str) -> None:
    algorithm = {"advantage_estimator": estimator, "loss_type": "dppo_tv", "eps_clip": 0.1}
    assert parse(config(rollout=LAGGED, algorithm=algorithm)).algorithm.corrects_for_lag
