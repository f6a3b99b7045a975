"""Digests of the inputs that a step read under recorded terms."""

from cairn.configs.digest import recorded_digest
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.terms import Terms
from cairn.storage.store import canonical


def config_digest(terms: Terms, step: Step) -> str:
    """Return the digest of what a step reads of a configuration, including the source of user code."""
    rules = terms.rules[step]
    fields = recorded_digest(terms.config, rules.reads)
    sources = {option: terms.plugin_digest(option) for option in rules.plugins}
    return canonical.digest({"fields": fields, "plugins": sources}) if any(sources.values()) else fields


def external_inputs(terms: Terms, step: Step) -> dict[str, str]:
    """Return the digests of what a step reads from outside the ledger, and of what its engines are made from. A run
    need not have every external input."""
    rules = terms.rules[step]
    read = {name: terms.inputs[name] for name in rules.externals if name in terms.inputs}
    return read | {f"engine.{name}": recorded_digest(terms.config, options) for name, options in rules.engines.items()}
