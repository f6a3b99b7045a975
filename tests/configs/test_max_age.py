"""Older tokens are trained on only where there are any, and something corrects for them."""

from typing import Any

import pytest
from pydantic import ValidationError

from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from tests.mistakes import mistakes

ROLLOUT = {"num_rollout": 2, "rollout_batch_size": 4, "over_sampling_batch_size": 6, "rollout_max_response_len": 8}


def config(rollout: dict[str, Any], **algorithm: Any) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": ROLLOUT | rollout, "algorithm": algorithm}
    return RunConfig.model_validate(sections)


def test_by_default_nothing_is_older_than_the_newest_weights() -> None:
    assert config({}).rollout.oldest_trained == 0
    assert config({"max_age": 0}).rollout.oldest_trained == 0


@pytest.mark.parametrize("algorithm", [{"use_tis": True}, {"use_rollout_logprobs": True}, {"loss_type": "dppo_tv"}])
def test_older_tokens_are_allowed_where_something_corrects_for_them(algorithm: dict[str, Any]) -> None:
    assert config({"max_age": 2}, **algorithm).rollout.oldest_trained == 2


def test_a_loss_that_takes_no_ratio_needs_no_correction() -> None:
    taught = {"model": {"path": "m", "teacher_path": "t"}, "data": {"path": "d"}, "rollout": ROLLOUT | {"max_age": 2}}
    assert RunConfig.model_validate({**taught, "algorithm": {"loss_type": "forward_kl_topk"}}).rollout.max_age == 2


def test_older_tokens_are_refused_where_nothing_corrects_for_them() -> None:
    with pytest.raises(ValidationError, match=r"max_age is 2: .* nothing corrects .* set algorithm.use_tis=true"):
        config({"max_age": 2})


def test_options_that_would_do_nothing_are_refused() -> None:
    options = {"max_age": 2, "over_sampling_batch_size": 4}
    assert "max_age (2) has no effect" in mistakes(rollout=options, algorithm={"use_tis": True})
    partial = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    for options in ({}, {"max_age": 0}, {"mask_offpolicy_in_partial_rollout": False}):
        with pytest.raises(ValidationError, match=r"only the end of a continued response .* set max_age to 1"):
            config({**partial, **options})
    with pytest.raises(ValidationError, match="nothing corrects for the difference"):
        config({**partial, "max_age": 1})
    assert config({**partial, "max_age": 1}, use_tis=True).rollout.mask_offpolicy_in_partial_rollout


def test_a_run_that_was_begun_with_them_goes_on() -> None:
    partial = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    recorded = config({**partial, "max_age": 1}, use_tis=True).model_dump(mode="json")
    del recorded["rollout"]["max_age"]
    assert from_manifest(recorded).rollout.oldest_trained == 0


@pytest.mark.parametrize(("steps", "fits"), [(1, True), (2, True), (4, True), (16, False), (32, False)])
def test_an_optimizer_step_holds_a_whole_group_of_which_some_token_is_young_enough(steps: int, fits: bool) -> None:
    """4 groups of 8: in steps of 32, 16 and 8 samples there is a whole one, in steps of 2 and 1 there may be none."""
    sections = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rollout": ROLLOUT | {"partial_rollout": True, "max_age": 1},
        "algorithm": {"use_tis": True},
        "training": {"num_steps_per_rollout": steps},
    }
    if fits:
        assert RunConfig.model_validate(sections)
    else:
        with pytest.raises(
            ValidationError, match=r"an optimizer step has \d samples, which may all be of one group of 8"
        ):
            RunConfig.model_validate(sections)
