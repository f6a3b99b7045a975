"""A configuration that was recorded is read, and inherited by forks."""

from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import LOSS, Kind
from cairn.configs.loader import from_manifest, inherit, load, parse, released, with_section
from tests.mistakes import said
from tests.tables import cases


def recorded(recipe: Path, **changes: object) -> dict[str, Any]:
    """A manifest's configuration."""
    values = load(recipe).model_dump(mode="json")
    values["algorithm"] |= changes
    return values


@cases("loss", ["cispo", "dppo_tv", "sft_loss"])
def test_a_manifest_is_read_without_its_loss_which_takes_long_to_import(recipe: Path, loss: str) -> None:
    values = recorded(recipe, loss_type=loss)
    load_of_others = Kind.load

    def loading(kind: Kind, name: str) -> Any:
        assert kind is not LOSS
        return load_of_others(kind, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kind, "load", loading)
        assert from_manifest(values).algorithm.loss_type == loss


def test_a_mistake_of_a_fork_is_named(recipe: Path) -> None:
    values = recorded(recipe)
    (warning,) = said(lambda note: inherit(values, ["algorithm.tis_clip=4.0"], note))
    assert warning.startswith("algorithm.tis_clip (4.0) has no effect while algorithm.use_tis is false")
    with pytest.raises(ConfigError, match=r"training.lr is -1"):
        inherit(values, ["training.lr=-1"])
    with pytest.raises(ConfigError, match=r"did you mean training.lr\?"):
        inherit(values, ["training.lrr=1"])


def test_a_fork_leaves_out_what_it_inherits_and_takes_the_effect_of(recipe: Path) -> None:
    values = load(recipe, ["training.num_steps_per_rollout=2", "algorithm.eps_clip_high=0.28"]).model_dump(mode="json")
    one_step = ["training.num_steps_per_rollout=1"]
    (warning,) = said(lambda note: inherit(values, one_step, note))
    assert warning.startswith("algorithm.eps_clip_high (0.28) has no effect")
    assert inherit(values, one_step).algorithm.eps_clip_high is None


def test_the_kl_estimator_is_by_default_the_one_that_is_right_where_it_stands(recipe: Path) -> None:
    assert load(recipe, ["algorithm={use_kl_loss: true, kl_loss_coef: 0.1}"]).algorithm.kl_estimator == "k2"
    assert load(recipe, ["algorithm={advantage_estimator: ppo, kl_coef: 0.1}"]).algorithm.kl_estimator == "k1"


@cases(
    ("algorithm", "low", "high"),
    [
        ({}, 0.2, None),
        ({"advantage_estimator": "gspo"}, 3e-4, 4e-4),
        ({"loss_type": "cispo"}, 1.0, 4.0),
        ({"advantage_estimator": "gspo", "eps_clip": 0.1}, 0.1, None),
        ({"advantage_estimator": "file.py:estimate"}, 0.2, None),
    ],
)
def test_clip_ranges_that_are_left_out_are_those_of_the_loss_s_paper(
    algorithm: dict[str, Any], low: float, high: float | None
) -> None:
    """And are not said to have no effect, which the two sides of a ratio that is 1 do not have."""
    rollout = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": rollout, "algorithm": algorithm}
    steps = 2 if "eps_clip" in algorithm else 1
    found = parse({**sections, "training": {"num_steps_per_rollout": steps}}).algorithm
    assert (found.eps_clip, found.eps_clip_high) == (low, high)


def test_a_fork_with_another_loss_has_the_clip_range_of_its_paper_unless_one_was_named(recipe: Path) -> None:
    def clip_range(values: dict[str, Any], *overrides: str) -> tuple[float, float | None]:
        found = inherit(values, overrides).algorithm
        return found.eps_clip, found.eps_clip_high

    usual = load(recipe).model_dump(mode="json")
    assert clip_range(usual, "algorithm.loss_type=dppo_kl") == (0.05, None)
    assert clip_range(usual, "algorithm.loss_type=dppo_kl", "algorithm.eps_clip=0.2") == (0.2, None)
    gspo = load(recipe, ["algorithm.advantage_estimator=gspo"]).model_dump(mode="json")
    assert clip_range(gspo, "algorithm.advantage_estimator=grpo") == (0.2, None)
    assert clip_range(gspo, "training.lr=1e-5") == (3e-4, 4e-4)
    named = load(recipe, ["training.num_steps_per_rollout=2", "algorithm.eps_clip=0.1"]).model_dump(mode="json")
    assert clip_range(named, "algorithm.loss_type=dppo_kl") == (0.1, None)
    alone = with_section(from_manifest(usual), "algorithm", ["algorithm.advantage_estimator=gspo"], "").algorithm
    assert (alone.eps_clip, alone.eps_clip_high) == (3e-4, 4e-4)


def test_a_section_that_is_optional_is_named_whole_where_nothing_reads_it(recipe: Path) -> None:
    values = load(recipe, ["reward={rm_type: reward_model, reward_model: {path: m}}"]).model_dump(mode="json")
    overrides = ["algorithm.loss_type=sft_loss", "eval.eval_interval=null"]
    warnings = said(lambda note: inherit(values, overrides, note))
    assert any(one.startswith("reward.reward_model has no effect while algorithm.loss_type") for one in warnings)
    assert inherit(values, overrides).reward.reward_model is None


def test_a_user_s_own_correction_may_read_every_option_of_rejection(recipe: Path) -> None:
    own = "algorithm={use_tis: true, custom_tis_function_path: mine.py:correct, rs_level: sequence}"
    assert load(recipe, [own]).algorithm.rs_level == "sequence"


def test_rules_between_options_hold_for_a_recorded_configuration_once_it_is_to_be_executed(recipe: Path) -> None:
    values = load(recipe).model_dump(mode="json")
    values["rollout"]["rollout_stop"] = [""]
    read = from_manifest(values)
    with pytest.raises(ConfigError, match=r"in the ledger: rollout.*rollout_stop"):
        released(read)
