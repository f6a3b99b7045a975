"""Code of the user's, each kind by one file outside the tree: found, checked, run and digested."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cairn.configs.kinds import (
    ESTIMATOR,
    FILTER,
    KINDS,
    OPTIONS,
    REWARD,
    STATEFUL_SOURCE,
    TOOL,
    Kind,
    code_options,
    declared,
    named,
    plugin,
    readers,
    user_code,
)
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.training.needs import has_critic, loss_needs, scores_needed
from cairn.flows.driver.validation import setup_problems
from cairn.tasks.advantages.batch import ScoredBatch
from cairn.tasks.advantages.step import estimate
from tests.tiny_run import tiny_config

FUNCTIONS = [kind for kind in KINDS if kind is not TOOL]
"""A tool is an object, which says itself what it takes."""


def written(folder: Path, code: str, function: str) -> str:
    file = folder / "mine.py"
    file.write_text(code)
    return f"{file}:{function}"


def test_ours_are_the_files_of_the_folder_and_each_is_what_its_kind_is() -> None:
    for kind in KINDS:
        assert kind.built_in_names() or kind is STATEFUL_SOURCE, kind.name  # there is no built-in source with a state
        assert "__init__" not in kind.built_in_names(), kind.name
        for name in kind.built_in_names():
            function = kind.load(name)
            assert function.__module__ == f"{kind.package}.{name}"
            assert function.__doc__ or function.__module__.__doc__, f"{kind.name} {name}"
            without_import, declaration = kind.declaration(name), declared(function)
            assert (without_import.picks is None) == (declaration.picks is None), f"{kind.name} {name}"
            assert replace(without_import, picks=None) == replace(declaration, picks=None), f"{kind.name} {name}"


def test_the_names_that_ledgers_record_are_there() -> None:
    assert {"grpo", "ppo"} <= {*ESTIMATOR.built_in_names()}
    assert {"math", "exact_match", "random"} <= {*REWARD.built_in_names()}
    assert {"check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"} <= {*FILTER.built_in_names()}


def test_an_option_of_some_estimators_is_known_by_those_that_read_it() -> None:
    assert readers(ESTIMATOR)["lambd"] == ["ppo"]
    assert readers(ESTIMATOR)["gamma"] == ["ppo", "reinforce_plus_plus"]
    assert {"cispo", "grpo", "gspo"} <= {*readers(ESTIMATOR)["rewards_normalization"]}


def test_what_names_code_counts_where_it_is_read(tiny_assets: Path) -> None:
    assert code_options(
        (
            "reward",
            "rollout.seed",
        )
    ) == ("reward.custom_rm_path",)
    assert code_options(("rollout.dynamic_sampling_filter",)) == ("rollout.dynamic_sampling_filter",)
    assert code_options(("rollout.dynamic",)) == ()
    assert set(user_code(tiny_config(tiny_assets))) == {"reward.custom_rm_path"}
    assert "algorithm.advantage_estimator" in OPTIONS


def test_code_that_members_of_a_list_name_is_found_in_each_and_counts_together(tiny_assets: Path) -> None:
    def config(*metrics: str) -> RunConfig:
        listed = [
            {"name": f"b{i}", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4, "metric": metric}
            for i, metric in enumerate(metrics)
        ]
        return tiny_config(tiny_assets, eval={"benchmarks": listed})

    option = "eval.benchmarks.metric"
    assert named(config("mean", "a.b"), option) == {
        "eval.benchmarks.0.metric": "mean",
        "eval.benchmarks.1.metric": "a.b",
    }
    assert user_code(config("mean", "mean")).keys() == {"reward.custom_rm_path"}
    assert user_code(config("a.b", "mean", "c.py:d"))[option] == ["a.b", "c.py:d"]
    assert option in code_options(("eval.benchmarks",))
    assert named(config("mean"), "rollout.dynamic_sampling_filter") == {}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def mine(batch):\n    pass\n", r"mine' takes \(batch\): let it take \(batch, config\)"),
        ("async def mine(batch, config):\n    pass\n", r"is a coroutine function: let it be a plain function"),
        ("def mine(batch, config):\n    yield\n", r"is a generator function: let it be a plain function"),
        (
            "import cairn\n\n@cairn.plugin(needs={'vibes'})\ndef mine(batch, config):\n    pass\n",
            r"needs 'vibes', which nothing computes: let it need some of components, old_log_probs, ref_log_probs",
        ),
        ("yours = 1\n", "mine does not exist"),
    ],
)
def test_code_that_is_not_of_its_kind_is_refused_in_a_sentence(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(BadPlugin, match=says) as caught:
        ESTIMATOR.load(written(tmp_path, code, "mine"))
    assert "\n" not in str(caught.value)


def refusal(kind: Kind, folder: Path, code: str) -> str:
    """What is said of `mine` of a file of its own; nothing if it is taken."""
    try:
        kind.load(written(Path(tempfile.mkdtemp(dir=folder)), code, "mine"))
    except BadPlugin as error:
        return str(error)
    return ""


WANTED = {None: "a plain or a coroutine function", True: "a coroutine function", False: "a plain function"}


def test_other_arguments_and_another_sort_of_function_are_refused(tmp_path: Path) -> None:
    unrefused = []
    for kind in FUNCTIONS:
        start, ways = "async " if kind.waits else "", [", ".join(way) for way in kind.takes]
        said = refusal(kind, tmp_path, f"{start}def mine(): ...\n")
        named = " by these names" if len(ways) > 1 else ""
        if not said.endswith(f"takes (): let it take ({') or ('.join(ways)}){named}"):
            unrefused.append((kind.name, said))
        body = "yield" if kind.waits is None else "..."
        said = refusal(kind, tmp_path, f"{'' if kind.waits else 'async '}def mine({ways[0]}): {body}\n")
        if not re.search(f"^the {kind.name} .* function: let it be {WANTED[kind.waits]}", said):
            unrefused.append((kind.name, said))
    assert unrefused == []


def test_a_need_that_nobody_knows_and_options_that_nobody_gives_are_refused(tmp_path: Path) -> None:
    wrong = []
    for kind in FUNCTIONS:
        start, arguments = "async " if kind.waits else "", ", ".join(kind.takes[0])
        code = f"import cairn\n\n\n@cairn.plugin(%s)\n{start}def mine({arguments}): ...\n"
        known = ", ".join(sorted(kind.needs)) or "nothing"
        said = refusal(kind, tmp_path, code % "needs={'vibes'}")
        if not re.search(f"the {kind.name} .* needs 'vibes', .* let it need some of {known}$", said):
            wrong.append((kind.name, said))
        said = refusal(kind, tmp_path, code % "reads={'gamma'}")
        no_options = f"reads 'gamma', but no {kind.name} receives options: leave it out"
        if (said != "") if "config" in kind.takes[0] else (no_options not in said):
            wrong.append((kind.name, said))
    assert wrong == []


FORMS = """
import functools
from cairn import plugin

needing = plugin(needs={"ref_log_probs"})

@needing
def more(factor, batch, config): ...

@needing
def plain(batch, config): ...

class Estimator:
    @needing
    def __call__(self, batch, config): ...

partial_of_it = functools.partial(functools.partial(more), 2)
cached = functools.lru_cache(plain)
object_of_it = Estimator()
method = object_of_it.__call__
"""


def test_options_that_are_not_there_and_a_teacher_that_is_missing_are_told_before_anything_starts(
    tiny_assets: Path, tmp_path: Path
) -> None:
    code = "import cairn\n\n\n@cairn.plugin(%s)\ndef mine(batch, config): ...\n"
    path = written(tmp_path, code % "reads={'gama'}", "mine")
    (problem,) = setup_problems(tiny_config(tiny_assets, algorithm={"advantage_estimator": path}))
    assert problem.endswith("reads 'gama', which is not an option of algorithm: did you mean gamma?")
    (tmp_path / "taught.py").write_text(code % "needs={'teacher_log_probs'}")
    algorithm = {"advantage_estimator": f"{tmp_path / 'taught.py'}:mine"}
    (problem,) = setup_problems(tiny_config(tiny_assets, algorithm=algorithm))
    assert problem.endswith(
        "mine needs the log-probs of a teacher: set model.teacher_path to its folder, or model.teacher_url"
    )
    model = str(tiny_assets / "model")
    taught = tiny_config(tiny_assets, algorithm=algorithm, model={"teacher_path": model})
    assert setup_problems(taught) == []


def test_what_a_function_declares_holds_in_whatever_form_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "forms.py").write_text(FORMS)
    for name in ("plain", "partial_of_it", "cached", "method", "object_of_it"):
        assert declared(ESTIMATOR.load(f"{tmp_path / 'forms.py'}:{name}")).needs == {"ref_log_probs"}, name


def test_one_name_in_the_place_of_a_set_of_them_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write needs=\{'values'\}"):
        plugin(needs="values")


def test_a_name_that_stands_for_nothing_is_told_beside_those_that_do() -> None:
    with pytest.raises(BadPlugin, match=r"there is no advantage estimator 'gppo': use one of .*grpo, .*ppo.* or file"):
        ESTIMATOR.load("gppo")


def test_from_what_an_estimator_declares_follows_what_is_scored(tmp_path: Path) -> None:
    code = "import cairn\n\n@cairn.plugin(needs={'values', 'ref_log_probs'})\ndef mine(batch, config):\n    pass\n"
    algorithm = AlgorithmConfig(advantage_estimator=written(tmp_path, code, "mine"))
    assert has_critic(algorithm)
    assert scores_needed(algorithm) == {"ref_log_probs": "ref", "values": "critic"}
    assert declared(ESTIMATOR.load("ppo")).needs == {"values"}
    assert scores_needed(AlgorithmConfig()) == {}
    assert scores_needed(AlgorithmConfig(), num_steps=2) == {"old_log_probs": "actor"}


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_an_estimator_may_say_which_loss_goes_with_it(name: str, tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(advantage_estimator=name)
    assert algorithm.loss == name
    assert AlgorithmConfig(loss_type=name).loss == name
    assert AlgorithmConfig(advantage_estimator=name, loss_type=name).loss == name
    assert loss_needs(algorithm) == loss_needs(AlgorithmConfig(loss_type=name))
    assert scores_needed(algorithm) == {}
    assert scores_needed(algorithm, num_steps=2) == {"old_log_probs": "actor"}
    batch = ScoredBatch(np.array([1.0, 0.0, 0.5]), [3], [np.ones(2, np.uint8)] * 3)
    for found, expected in zip(estimate(batch, algorithm), estimate(batch, AlgorithmConfig()), strict=True):
        np.testing.assert_array_equal(found, expected)
    code = f"import cairn\n\n@cairn.plugin(loss={name!r})\ndef mine(batch, config):\n    pass\n"
    mine = written(tmp_path, code, "mine")
    assert AlgorithmConfig(advantage_estimator=mine).loss == name
    assert AlgorithmConfig(advantage_estimator=mine, loss_type="sft_loss").loss == "sft_loss"


def test_a_loss_that_cannot_go_with_what_declares_it_is_refused(tmp_path: Path) -> None:
    code = "import cairn\n\n@cairn.plugin(loss=%r)\ndef mine(%s):\n    pass\n"
    with pytest.raises(BadPlugin, match=r"the loss 'gpso', which does not fit it: name one of cispo, .*gspo"):
        ESTIMATOR.load(written(tmp_path, code % ("gpso", "batch, config"), "mine"))
    (tmp_path / "other.py").write_text(code % ("gspo", "rewards"))
    with pytest.raises(BadPlugin, match=r"the filter .* declares the loss 'gspo', which does not fit it: leave it"):
        FILTER.load(f"{tmp_path / 'other.py'}:mine")


@pytest.mark.parametrize("returned", ["None", "batch.rewards, batch.rewards", "batch.spread(batch.rewards)"])
def test_an_estimator_that_returns_something_else_is_named(tmp_path: Path, returned: str) -> None:
    path = written(tmp_path, f"def mine(batch, config):\n    return {returned}\n", "mine")
    batch = ScoredBatch(np.zeros(2), [2], [np.ones(3, np.uint8), np.ones(1, np.uint8)])
    with pytest.raises(BadPlugin, match=r"mine' must return \(advantages, returns\)"):
        estimate(batch, AlgorithmConfig(advantage_estimator=path))
