"""slime's flags and their counterparts."""

import re
from pathlib import Path

import pytest

from cairn.configs.counterparts import counterparts
from cairn.configs.errors import ConfigError
from cairn.configs.loader import load, options
from cairn.configs.schema.run import RunConfig

NAMES = {option.name: option for option in options(RunConfig)}
SECTIONS = {name.rpartition(".")[0] for name in NAMES}


def test_every_flag_has_a_counterpart_that_there_is_or_a_reason() -> None:
    declared = [flag for flag in counterparts().values() if flag.group != "In slime's guides"]
    assert len(declared) == 223  # `add_argument` and `reset_arg` of slime/utils/arguments.py, each name once
    for flag in counterparts().values():
        assert set(flag.options) <= NAMES.keys() | SECTIONS, flag.flag
        assert bool(flag.options or flag.how) != bool(flag.why), flag.flag


def test_what_options_say_of_slime_is_in_the_table() -> None:
    for name, option in NAMES.items():
        for words in re.findall(r"slime: (.*?)(?:\.$|\. |$)", option.description):
            for flag in re.findall(r"`(--(?!sglang-)[a-z-]+)`", words):  # those of SGLang pass through
                one = counterparts().get(flag.removeprefix("--").replace("-", "_"))
                assert one is not None, f"{name} names {flag}, which slime does not have"
                assert one.options or one.how, f"{name} names {flag}, which is said to have no counterpart"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.use_dynamic_batch_size=true", "--use-dynamic-batch-size is here: training.max_tokens_per_gpu"),
        ("rollout.rollout-sample-hook-path=x", "slime's --rollout-sample-hook-path has no counterpart: the generate"),
        ("training.rm_type=math", "did you mean reward.rm_type?"),
    ],
)
def test_an_option_that_is_a_flag_of_slimes_is_told_its_counterpart(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(Path(__file__).parents[2] / "configs/recipes/quickstart.yaml", [override])
