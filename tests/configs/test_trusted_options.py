"""Whoever adds an option that holds text or a mapping decides what a store may set it to."""

from cairn.flows.driver.trust import RULES, free_options


def test_every_option_of_text_has_a_rule_for_what_a_store_may_set() -> None:
    assert sorted(set(free_options()) - set(RULES)) == []
    assert sorted(set(RULES) - set(free_options())) == []
