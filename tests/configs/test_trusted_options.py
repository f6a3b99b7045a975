"""Options that hold text or a mapping, and that no store may set whatever they hold."""

from cairn.configs.kinds import OPTIONS
from cairn.configs.schema.base import FromStore
from cairn.flows.driver.trust import RULES, free_options

OF_THE_USER = {
    "reward.code.bwrap",  # programs of this machine, which run
    "reward.code.python",
    "rollout.tool_options.python.bwrap",
    "rollout.tool_options.python.python",
    "rollout.tool_options.shell.bwrap",
    "reward.judge.pattern",  # one that never ends would block the driver
    "training.train_env_vars",  # they may name libraries to load
    "rollout.sglang_env_vars",
    "tracking.wandb_team",  # receivers of metrics and configuration
    "tracking.wandb_host",
    "tracking.prometheus_host",
}


def test_every_other_option_of_text_says_what_a_store_may_set() -> None:
    assert {option for option, rule in free_options().items() if rule is None} == OF_THE_USER


def test_every_option_that_names_code_is_of_the_type_of_code() -> None:
    assert {option for option, rule in free_options().items() if rule is FromStore.CODE} == set(OPTIONS)


def test_every_rule_is_defined() -> None:
    assert set(FromStore) - {FromStore.ENGINE_OPTIONS} == set(RULES)
