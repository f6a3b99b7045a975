"""Functions and classes of every shape that slime and the guides to it print, in files as people have them."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import canonical
from cairn.configs.loader import parse
from cairn.configs.plugins import BadPlugin, load_callable
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.slime import values_read
from cairn.configs.view import reads_under
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.stream import GroupResult
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards.sample import Sample
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

FILES = {
    "answers_of_policy.py": """\
from slime.utils.http_utils import post
from slime.rollout.sglang_rollout import get_model_url


async def generate_single(args, prompt):
    output = await post(get_model_url(args, "actor"), {"text": prompt, "sampling_params": {}})
    return output["text"]
""",
    "custom_generate.py": """\
from answers_of_policy import generate_single


async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        text = sample.prompt
        for turn in range(args.max_turns):
            response = await generate_single(args, text)
            text += response + " Again?"
        sample.response = response
        sample.turns = turn + 1
        sample.metadata["penalty"] = args.penalty
    return samples
""",
    "custom_rm.py": """\
import json


class CustomRewardModel:
    def __init__(self, model_path):
        with open(f"{model_path}/config.json") as file:
            self.width = json.load(file)["hidden_size"]

    def compute_reward(self, prompts, responses):
        pairs = zip(prompts, responses)
        return [len(prompt) / 100 + sum(map(ord, response)) % 7 + self.width for prompt, response in pairs]
""",
    "selection.py": """\
def my_filter(args, samples, **kwargs):
    assert all(sample.turns == 2 and sample.metadata["penalty"] == 0.5 for sample in samples)
    return all(sample.reward > 0 for sample in samples)


def buffer_filter(args, buffer, num_samples):
    assert num_samples == args.rollout_batch_size
    return sorted(buffer, key=lambda group: group.reward, reverse=True)[:num_samples]


def drop_first(args, samples):
    for group in samples:
        group[0].remove_sample = True
""",
    "source.py": """\
from slime.data import RolloutDataSourceWithBuffer, Sample


class Hard(RolloutDataSourceWithBuffer):
    def __init__(self, dataset, args):
        super().__init__(dataset, args)
        self.rewards = []

    def add_samples(self, samples):
        self.rewards += [group.reward for group in samples]
        self.buffer.extend(group for group in samples if group.reward is not None and group.reward < 4)

    def buffer_filter(self, args, buffer, num_samples):
        return sorted(buffer, key=lambda group: group.reward)[:num_samples]
""",
}


@pytest.fixture
def project(tmp_path: Path, tiny_assets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files, on the import path."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def recipe(project: Path, assets: Path, **sections: dict[str, Any]) -> Any:
    values = tiny_config(assets).model_dump(mode="json")
    for name, options in sections.items():
        values[name] |= options
    return parse(values)


def test_a_run_takes_them_as_they_stand(project: Path, tiny_assets: Path, tmp_path: Path) -> None:
    config = recipe(
        project,
        tiny_assets,
        data={"get_samples_path": "source:Hard"},
        reward={"custom_rm_path": f"{project}/custom_rm.py", "custom_rm_model_path": str(tiny_assets / "model")},
        rollout={
            "custom_generate_function_path": f"{project}/custom_generate.py",
            "dynamic_sampling_filter": "selection:my_filter",
            "buffer_filter_path": "selection.buffer_filter",
            "rollout_sample_filter_path": "selection:drop_first",
            "over_sampling_batch_size": 5,
            "max_turns": 2,
            "custom_config": {"penalty": 0.5},
        },
    )
    assert config.rollout.custom_generate_function_path == f"{project}/custom_generate.py:custom_generate"
    assert config.rollout.dynamic_sampling_filter == "selection.my_filter"
    assert config.reward.custom_rm_path == f"{project}/custom_rm.py:CustomRewardModel"
    assert setup_problems(config) == []
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        for number in range(2):
            iteration(run, DirectSteps(run), number)
        groups = [run.read(one).to_pylist() for one in run.ledger.commits(0) if one.step is Step.FILTER][-1]
        rollouts = [one for one in run.ledger.commits(1) if one.step is Step.ROLLOUT]
        sampled = [row for one in rollouts for row in run.read(one).to_pylist()]
    trained = [group for group in groups if group["disposition"] == "train"]
    assert [group["mean_reward"] for group in trained] == sorted((g["mean_reward"] for g in groups), reverse=True)[:4]
    assert [group["removed"] for group in trained] == [[0]] * 4
    assert all(len(row["segments"]) == 3 and row["error"] is None for row in sampled)
    assert {json.loads(row["trajectory_infos"][0])["turns"] for row in sampled} == {2}


def test_a_data_source_is_the_same_after_every_commit(project: Path, tiny_assets: Path) -> None:
    data = {"get_samples_path": f"{project}/source.py", "label_key": "label"}
    config = recipe(project, tiny_assets, data=data)
    tokenizer = load_tokenizer(config.model.path)

    def drawn(again: bool) -> list[list[str]]:
        """Prompts of three rounds; each round opens the source again, or one source serves all."""
        source, cursor, results, rounds = open_data(config, tokenizer), 0, (), []
        for number in range(3):
            source = open_data(config, tokenizer) if again else source
            draw = source.draw(cursor, 4, results, max_prompt_len=None)
            cursor = json.loads(json.dumps(draw.cursor))
            rounds.append([row.prompt_text for row in draw.rows])
            results = [
                GroupResult(row.group_id, row.index, row.label, {}, float(place + number), 0.0, True, None)
                for place, row in enumerate(draw.rows)
            ]
        return rounds

    rounds = drawn(again=True)
    assert rounds == drawn(again=False)
    assert rounds[1] == rounds[0], "all four had rewards below 4, in this order"
    assert rounds[2][:3] == rounds[0][:3]
    assert rounds[2][3] not in rounds[0]


def test_a_repeated_draw_finds_no_attribute_that_was_set_after_its_state(project: Path, tiny_assets: Path) -> None:
    (project / "late.py").write_text("""\
class Late:
    def get_samples(self, num_samples):
        from slime.data import Sample

        self.drawn = getattr(self, "drawn", 0) + num_samples
        return [[Sample(prompt=str(self.drawn), label="")] for _ in range(num_samples)]
""")
    config = recipe(project, tiny_assets, data={"get_samples_path": f"{project}/late.py", "label_key": "label"})
    source = open_data(config, load_tokenizer(config.model.path))
    first, again = (source.draw(0, 4, (), max_prompt_len=None) for _ in range(2))
    assert [row.prompt_text for row in first.rows] == [row.prompt_text for row in again.rows]
    assert first.cursor == again.cursor


@pytest.mark.parametrize(
    ("option", "name", "recorded"),
    [
        ("rollout.dynamic_sampling_filter", "a.b:keep", "a.b.keep"),
        ("rollout.dynamic_sampling_filter", "f.py:keep", "f.py:keep"),
        (
            "rollout.dynamic_sampling_filter",
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "check_reward_nonzero_std",
        ),
        ("data.get_samples_path", "slime.rollout.data_source:RolloutDataSourceWithBuffer", None),
        ("rollout.custom_generate_function_path", "slime.rollout.sglang_rollout.generate", "single_turn"),
        ("algorithm.advantage_estimator", "grpo", "grpo"),
    ],
)
def test_a_name_is_recorded_in_one_form(option: str, name: str, recorded: str | None) -> None:
    assert canonical(option, name) == recorded


def test_a_file_alone_names_its_only_fitting_function(project: Path, tiny_assets: Path) -> None:
    file = project / "two.py"
    file.write_text("async def one(args, sample): ...\ndef many(args, samples): ...\ndef helper(x, y): ...\n")
    with pytest.raises(ConfigError, match=rf"{file} has several: write {file}:one or {file}:many"):
        recipe(project, tiny_assets, reward={"custom_rm_path": str(file)})
    file.write_text("def helper(x, y): ...\n")
    with pytest.raises(
        ConfigError, match=r"has no grader, which takes \(sample\) or .*; its functions: helper\(x, y\)"
    ):
        recipe(project, tiny_assets, reward={"custom_rm_path": str(file)})


@pytest.mark.parametrize(
    ("signature", "taken"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", [("math", "4", "5", {"data_source": "math"})]),
        ("solution_str, ground_truth, strict=False", [("4", "5")]),
        ("prompts, responses", [(["2+2="], ["4"])]),
        ("prompts, completions, **kwargs", [(["2+2="], ["4"])]),
        ("response, label, metadata", [("4", "5", {"data_source": "math"})]),
    ],
)
def test_arguments_are_bound_by_name(tmp_path: Path, signature: str, taken: list[Any]) -> None:
    names = [name.partition("=")[0] for name in signature.split(", ") if "*" not in name and name != "strict=False"]
    several = "prompts" in names
    body = f"    seen = {{'reward': 1.0, 'seen': [{', '.join(names)}]}}\n    return {'[seen]' if several else 'seen'}\n"
    (tmp_path / "named.py").write_text(f"def score({signature}):\n{body}")
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/named.py:score")) as grader:
        (graded,) = grader.grade([Sample("4", "5", {"data_source": "math"}, prompt="2+2=")])
    assert graded.error is None
    assert graded.components is not None
    assert [tuple(graded.components["seen"])] == taken


@pytest.mark.parametrize(
    ("option", "signature", "says"),
    [
        ("custom_rm_path", "sample, weight", r"takes \(sample, weight\): let it take \(sample\) or .* by these names"),
        ("custom_rm_path", "args, weight", r"takes \(args, weight\): let it take \(sample\) or .* by these names"),
        ("custom_generate_function_path", "args, prompt, params", r"takes \(args, prompt, params\): let it take"),
    ],
)
def test_what_cannot_be_bound_is_refused(
    tmp_path: Path, tiny_assets: Path, option: str, signature: str, says: str
) -> None:
    (tmp_path / "other.py").write_text(f"async def other({signature}): ...\n")
    section = "reward" if option == "custom_rm_path" else "rollout"
    config = recipe(tmp_path, tiny_assets, **{section: {option: f"{tmp_path}/other.py:other"}})
    (problem,) = [one for one in setup_problems(config) if "let it take" in one]
    assert re.search(says, problem)


def test_a_model_path_that_is_missing_is_named(project: Path, tiny_assets: Path) -> None:
    config = recipe(project, tiny_assets, reward={"custom_rm_path": f"{project}/custom_rm.py"})
    (problem,) = setup_problems(config)
    assert "needs model_path for its constructor(model_path): set reward.custom_rm_model_path" in problem


def test_args_have_the_flags_of_slime_and_megatron(tmp_path: Path, tiny_assets: Path) -> None:
    names = ("context_parallel_size", "max_tokens_per_gpu", "num_layers", "hf_checkpoint", "rollout_sample_hook_path")
    more = ("tensor_model_parallel_size", "n_samples_per_prompt", "grpo_std_normalization", "mine")
    read = ", ".join(f"args.{name}" for name in (*names, *more))
    (tmp_path / "reads.py").write_text(
        "def grade(args, sample):\n    assert getattr(args, 'no_such', 3) == 3\n"
        f"    return {{'reward': 0, 'read': [{read}]}}\n"
    )
    reward = {"custom_rm_path": f"{tmp_path}/reads.py"}
    config = recipe(
        tmp_path,
        tiny_assets,
        reward=reward,
        training={"max_tokens_per_gpu": 512},
        rollout={"custom_config": {"mine": 7}},
    )
    assert config.reward.custom_rm_path is not None
    values = values_read(config, load_callable(config.reward.custom_rm_path))
    with GraderPool(config.reward, args=values) as grader:
        (graded,) = grader.grade([Sample("", None)])
    assert graded.components is not None
    counted = reads_under(config, ("reward.custom_rm_path",))
    assert {"training.max_tokens_per_gpu", "training.megatron", "rollout.custom_config"} <= {*counted}
    assert "training.lr" not in counted
    model = json.loads((tiny_assets / "model" / "config.json").read_text())
    assert graded.components["read"] == [
        *(1, 512, model["num_hidden_layers"], str(tiny_assets / "model"), []),
        *(1, 4, True, 7),
    ]


def test_a_flag_that_the_file_does_not_name_is_no_silent_default(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(
        "def grade(args, sample):\n    return vars(args)['_no'] if 0 else getattr(args, 'l' + 'r')\n"
    )
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/hidden.py:grade")) as grader:
        (graded,) = grader.grade([Sample("", None)])
    assert "args.lr is training.lr here" in (graded.error or "")


def test_a_neighbour_that_is_another_module_here_is_refused(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "answers_of_policy.py").write_text("generate_single = None\n")
    (other / "mine.py").write_text("import answers_of_policy\n\n\ndef grade(sample):\n    return 0.0\n")
    with pytest.raises(
        BadPlugin, match=r"mine\.py imports answers_of_policy, which is .* and not the one in its own folder"
    ):
        load_callable(f"{other}/mine.py:grade")


def test_a_package_beside_a_file_hides_no_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed" / "spread_out" / "core").mkdir(parents=True)  # a namespace package, such as megatron
    (tmp_path / "code" / "spread_out").mkdir(parents=True)
    (tmp_path / "code" / "spread_out" / "__init__.py").touch()
    (tmp_path / "code" / "mine.py").write_text("def grade(sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    load_callable(f"{tmp_path}/code/mine.py:grade")
    assert importlib.import_module("spread_out.core")
