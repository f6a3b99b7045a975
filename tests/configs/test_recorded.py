"""A configuration that was recorded is read and inherited as its run had it, whatever rules came later."""

from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import LOSS, Kind
from cairn.configs.loader import from_manifest, in_recorded_words, inherit, load, parse
from tests.tables import cases


def without_rules(recipe: Path, **changes: object) -> dict[str, Any]:
    """A manifest's configuration as a version without some of today's rules recorded it."""
    values = load(recipe).model_dump(mode="json")
    values["algorithm"] |= changes
    return values


def test_what_a_manifest_says_is_read_whatever_rules_were_added_since(recipe: Path) -> None:
    values = without_rules(
        recipe, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1", tis_clip=5.0, eps_clip_high=0.28
    )
    values["rollout"]["rollout_top_k"] = 0
    with pytest.raises(ConfigError):
        parse(values)
    config = from_manifest(values)
    assert config.model_dump(mode="json") == values
    assert config.algorithm.kl_estimator == "k1"


@cases("loss", ["cispo", "dppo_tv", "sft_loss"])
def test_a_manifest_is_read_without_its_loss_which_takes_long_to_import(recipe: Path, loss: str) -> None:
    values = without_rules(recipe, loss_type=loss)
    values["rollout"]["pipeline"] = "lagged"
    load_of_others = Kind.load

    def loading(kind: Kind, name: str) -> Any:
        assert kind is not LOSS
        return load_of_others(kind, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kind, "load", loading)
        assert from_manifest(values).algorithm.loss_type == loss


def test_a_fork_inherits_what_a_rule_that_was_added_since_is_against(recipe: Path) -> None:
    values = without_rules(recipe, eps_clip_high=0.28, tis_clip=5.0)
    forked = inherit(values, ["training.lr=1e-5"])
    assert (forked.algorithm.eps_clip_high, forked.algorithm.tis_clip, forked.training.lr) == (0.28, 5.0, 1e-5)
    with pytest.raises(ConfigError, match=r"tis_clip \(4.0\) has no effect while use_tis is false"):
        inherit(values, ["algorithm.tis_clip=4.0"])
    with pytest.raises(ConfigError, match=r"training.lr is -1"):
        inherit(values, ["training.lr=-1"])
    with pytest.raises(ConfigError, match=r"did you mean training.lr\?"):
        inherit(values, ["training.lrr=1"])


def test_what_a_fork_inherits_hides_no_mistake_of_its_own(recipe: Path) -> None:
    """Manifests of the first format name k1, which is refused as a loss."""
    values = without_rules(recipe, kl_loss_type="k1", tis_clip=5.0, opd_kl_coef=2.0, eps_clip_high=0.28)
    assert inherit(values, ["training.lr=1e-5"]).algorithm.opd_kl_coef == 2.0
    with pytest.raises(ConfigError, match=r"kl_loss_type \(k1\) has a gradient of 0 on average"):
        inherit(values, ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"])
    with pytest.raises(ConfigError, match=r"algorithm.eps_clip_c \(3.0\) has no effect"):
        inherit(values, ["algorithm.eps_clip_c=3.0"])


def test_a_fork_that_takes_the_effect_of_what_it_inherits_is_told_what_to_set_besides(recipe: Path) -> None:
    values = load(recipe, ["training.num_steps_per_rollout=2", "algorithm.eps_clip_high=0.28"]).model_dump(mode="json")
    one_step = ["training.num_steps_per_rollout=1"]
    with pytest.raises(
        ConfigError,
        match=r"eps_clip_high \(0.28\) has no effect .* by --set algorithm.eps_clip_high=null\)$",
    ):
        inherit(values, one_step)
    assert inherit(values, [*one_step, "algorithm.eps_clip_high=null"]).algorithm.eps_clip_high is None


@cases("mode", [True, False])
def test_deterministic_mode_of_megatron_in_a_manifest_is_that_of_training(recipe: Path, mode: bool) -> None:
    values = load(recipe, ["training.engine=megatron", "training.megatron.sequence_parallel=false"]).model_dump(
        mode="json"
    )
    del values["training"]["deterministic_mode"]
    values["training"]["megatron"]["deterministic_mode"] = mode
    for config in (from_manifest(values), inherit(values, ["training.lr=1e-5"])):
        assert config.training.deterministic_mode is mode
        assert config.training.megatron == {"sequence_parallel": False}
    assert values["training"]["megatron"]["deterministic_mode"] is mode, "the manifest stays as it is"


def test_a_rule_that_a_manifest_never_could_have_passed_still_holds(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        from_manifest(without_rules(recipe, use_rollout_logprobs=True, use_tis=True))


def test_a_manifest_that_names_the_former_default_of_the_kl_estimator_can_be_forked_and_goes_on_with_its_recipe(
    recipe: Path,
) -> None:
    values = without_rules(recipe, kl_loss_type="k1")
    assert inherit(values, ["training.lr=1e-5"]).algorithm.kl_loss_type == "k1"
    assert in_recorded_words(load(recipe), values).model_dump(mode="json") == values


def test_in_a_run_that_knew_of_no_graders_of_rows_they_name_none(recipe: Path) -> None:
    values = load(recipe).model_dump(mode="json")
    del values["reward"]["rm_type_key"]
    assert from_manifest(values).reward.rm_type_key is None
    assert inherit(values, ["training.lr=1e-5"]).reward.rm_type_key is None
    assert inherit(values, ["reward.rm_type_key=rm_type"]).reward.rm_type_key == "rm_type"
    assert in_recorded_words(load(recipe), values) == from_manifest(values)


def test_a_recipe_that_means_another_kl_estimator_than_the_manifest_is_not_bent_to_it(recipe: Path) -> None:
    loss = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"]
    values = without_rules(recipe, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1")
    assert in_recorded_words(load(recipe, loss), values).algorithm.kl_loss_type is None
    named = load(recipe, [*loss, "algorithm.kl_loss_type=k3"])
    assert in_recorded_words(named, values).algorithm.kl_loss_type == "k3"


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
    recorded = from_manifest({**sections, "algorithm": algorithm}).algorithm
    assert recorded.eps_clip == algorithm.get("eps_clip", 0.2), "as the version had it that recorded the run"


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
