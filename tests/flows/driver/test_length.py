"""Epochs say how long a run is, and the run records how many iterations that makes."""

import re
from pathlib import Path

import pytest
import yaml

from cairn.configs.errors import ConfigError
from cairn.configs.loader import load, parse
from cairn.flows.driver.length import with_length
from tests.tiny_run import tiny_config


def written(assets: Path, **rollout: object) -> dict[str, object]:
    values = tiny_config(assets).model_dump(mode="json")
    values["rollout"] = {"rollout_batch_size": 4, "rollout_max_response_len": 12, **rollout}
    return values


@pytest.mark.parametrize(("batch", "epochs", "total"), [(4, 1, 6), (4, 3, 18), (5, 2, 8), (24, 1, 1)])
def test_epochs_are_whole_batches_of_the_rows(tiny_assets: Path, batch: int, epochs: int, total: int) -> None:
    """slime: `num_rollout = num_epoch * (len(data) // rollout_batch_size)`, here of 24 rows."""
    config = with_length(parse(written(tiny_assets, num_epoch=epochs, rollout_batch_size=batch)))
    assert (config.rollout.num_rollout, config.rollout.num_epoch) == (total, epochs)
    assert with_length(config) == config  # as the ledger gives it back


def test_a_run_without_epochs_stays_as_it_is(tiny_assets: Path) -> None:
    config = tiny_config(tiny_assets)
    assert with_length(config) is config


def test_either_may_be_taken_back_as_the_message_says(tiny_assets: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(written(tiny_assets, num_epoch=2, num_rollout=11)))
    with pytest.raises(ConfigError, match="leave one of the two out") as refused:
        with_length(load(recipe))
    for way_out, total in zip(re.findall(r"--set (\S+=null)", str(refused.value)), (12, 11), strict=True):
        assert with_length(load(recipe, [way_out])).rollout.num_rollout == total


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({}, "rollout: num_rollout is required and missing"),
        ({"num_epoch": 2, "num_rollout": 11}, r"num_rollout is 11, but 24 rows // .* 4 × rollout.num_epoch 2 = 12 it"),
        ({"num_epoch": 2, "rollout_batch_size": 25}, "= 0 iterations: lower rollout.rollout_batch_size"),
        ({"num_epoch": 0}, "rollout.num_epoch is 0"),
    ],
)
def test_what_has_no_length_is_named(tiny_assets: Path, rollout: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_length(parse(written(tiny_assets, **rollout)))


def test_rules_of_the_length_hold_once_it_is_known(tiny_assets: Path) -> None:
    values = {**written(tiny_assets, num_epoch=1), "approval": {"before": [6]}}
    with pytest.raises(ConfigError, match=r"approval.before names iteration 6, but rollout.num_rollout is 6"):
        with_length(parse(values))


def test_a_mixture_has_no_epochs_of_its_own(tiny_assets: Path) -> None:
    values = written(tiny_assets, num_epoch=1)
    source = {"name": "one", "path": str(tiny_assets / "train.jsonl")}
    values["data"] = {"mixture": [source, {**source, "name": "two"}]}
    with pytest.raises(ConfigError, match="each source of a mixture has epochs of its own"):
        with_length(parse(values))
