"""The form of a run: what it offers, what it refuses, and what becomes of what was filled in."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prefect.utilities.callables import parameter_schema

from cairn.configs.catalogue import recipe_path
from cairn.configs.errors import ConfigError
from cairn.configs.loader import load, options
from cairn.configs.schema.run import RunConfig
from cairn.flows.deployments import NAMES
from cairn.flows.deployments.flows import FLOWS, fork, rescore, train
from cairn.flows.deployments.forms import CHANGED_OFTEN, Options, RewardOptions, recipes, set_lines

ROOT = Path(__file__).parents[3]
RECIPE = "quickstart"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return parameter_schema(train).model_dump_for_openapi()


def fields(schema: dict[str, Any], section: str = "Options") -> dict[str, dict[str, Any]]:
    return dict(schema["definitions"][section]["properties"])


def test_a_form_has_the_options_of_the_configuration_with_their_descriptions(schema: dict[str, Any]) -> None:
    wanted = {option.name: option.description for option in options(RunConfig)}
    offered = {name: field["description"] for name, field in fields(schema).items()}
    assert offered == {name: wanted[name] for name in CHANGED_OFTEN}
    graders = fields(parameter_schema(rescore).model_dump_for_openapi(), "RewardConfig")
    assert {name for name in wanted if name.startswith("reward.") and name.count(".") == 1} == {
        f"reward.{name}" for name in graders
    }
    leaves = [name for name in graders if not any(other.startswith(f"reward.{name}.") for other in wanted)]
    assert all(graders[name]["description"].startswith(wanted[f"reward.{name}"]) for name in leaves)


def test_the_form_of_a_run_is_one_that_people_read(schema: dict[str, Any]) -> None:
    assert len(schema["properties"]) + len(fields(schema)) <= 16
    assert list(schema["properties"])[:4] == ["recipe", "run", "options", "set"]


def test_nothing_but_the_recipe_need_be_filled_in_and_no_field_may_be_null(schema: dict[str, Any]) -> None:
    assert schema["required"] == ["recipe"]
    jsonschema.validate({"recipe": RECIPE}, schema)
    assert not [name for name, field in fields(schema).items() if {"type": "null"} in field.get("anyOf", ())]


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"options": {"rollout.num_rollout": 0}}, "less than the minimum of 1"),
        ({"options": {"training.lr": "fast"}}, "is not of type 'number'"),
        ({"options": {"rollout.num_rolouts": 3}}, "Additional properties are not allowed"),
        ({"recipe": "none.yaml"}, "is not one of"),
        ({"run": "../elsewhere"}, "does not match"),
        ({"restarts": -1}, "less than the minimum of 0"),
    ],
)
def test_what_no_run_could_have_is_refused_in_the_form(
    schema: dict[str, Any], parameters: dict[str, Any], why: str
) -> None:

    with pytest.raises(jsonschema.ValidationError, match=why):
        jsonschema.validate({"recipe": RECIPE, **parameters}, schema)


def test_what_was_filled_in_changes_the_recipe_and_nothing_else() -> None:
    filled: Any = {"rollout.num_rollout": 3, "training.lr": 1e-3}
    box = "seed=7\n\n# smaller\n--set training.lora.r=4\n"
    overrides = [*Options.model_validate(filled).overrides(), *set_lines(box)]
    form = load(recipe_path(RECIPE), overrides)
    plain = load(recipe_path(RECIPE))
    assert (form.seed, form.rollout.num_rollout, form.training.lr, form.training.lora.r) == (7, 3, 1e-3, 4)
    assert len(overrides) == 4
    assert form.reward == plain.reward
    assert list(Options().overrides()) == []


def test_a_switch_that_nobody_touched_is_not_sent() -> None:
    """An empty boolean looks off in Prefect's interface, whatever the recipe says."""
    graders = fields(parameter_schema(rescore).model_dump_for_openapi(), "RewardConfig")
    assert not [name for name, field in graders.items() if field.get("type") == "boolean"]
    assert list(RewardOptions.model_validate({"group_rm": "true"}).overrides()) == ["group_rm=true"]


def test_recipes_are_those_of_the_folder_and_those_that_come_with_cairn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(recipe_path(RECIPE).read_text())
    (tmp_path / "recipes" / "warmer.yaml").write_text("base: mine.yaml\nrollout: {rollout_temperature: 1.2}\n")
    (tmp_path / "prefect.yaml").write_text("deployments: []\n")
    monkeypatch.chdir(tmp_path)
    found = recipes(tmp_path)
    assert {"mine", "warmer", "Qwen3-4B", "quickstart"} <= set(found)
    assert not {"math", "prefect"} & set(found)
    assert recipe_path("mine") == tmp_path / "recipes" / "mine.yaml"
    assert (
        load(recipe_path("quickstart"))
        == load(recipe_path("quickstart.yaml"))
        == load(ROOT / "configs" / "recipes" / "quickstart.yaml")
    )
    (tmp_path / "quickstart.yaml").write_text(recipe_path(RECIPE).read_text())
    assert recipe_path("quickstart") == tmp_path / "quickstart.yaml", "a recipe of one's own wins"
    with pytest.raises(ConfigError, match=r"there is no recipe or file quickstrat; did you mean quickstart\?"):
        recipe_path("quickstrat")


def test_every_flow_says_what_it_does_and_what_each_parameter_means() -> None:
    for flow in FLOWS:
        described = parameter_schema(flow).properties
        assert flow.description, flow.name
        assert all(field.get("description") for field in described.values()), flow.name
    assert "rollout.num_rollout" in json.dumps(parameter_schema(fork).definitions)


def test_prefect_yaml_deploys_what_cairn_up_serves() -> None:
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert [one["entrypoint"] for one in described] == [f"cairn.flows.deployments.flows.{flow.name}" for flow in FLOWS]
    assert [one["name"] for one in described] == list(NAMES)
