"""Which committed steps no longer match, if a run's configuration, data, models or user code were others.

A step is stale itself if what it reads has another digest, and with it every step that was made from its commit.
"""

from collections.abc import Mapping
from typing import Any

from cairn.configs.loader import from_manifest
from cairn.configs.reads import reads_under
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import is_covered
from cairn.storage.commits import causal_order
from cairn.storage.ledger import Ledger
from cairn.storage.terms import differences
from cairn.tasks.step import DurableStep
from cairn.tasks.steps import steps_of

StaleStep = tuple[int, str, str | None, str]
"""(iteration, step, shard, why) of a commit."""


def stale_steps(ledger: Ledger, config: RunConfig, inputs: Mapping[str, str]) -> list[StaleStep]:
    """All commits of a run's own that would not be made from `config` and `inputs` as they were made, in the order of
    the ledger. `inputs`: digests by the names of the manifest's; those left out count as unchanged. Reads every commit.
    """
    terms = ledger.terms
    given = {name: inputs.get(name, digest) for name, digest in terms.inputs.items()}
    recorded = from_manifest(terms.config)
    reasons = {name: _changed(step, recorded, config, terms.inputs, given) for name, step in steps_of(recorded).items()}
    if not any(reasons.values()):
        return []
    found: dict[str, StaleStep] = {}
    for iteration in ledger.iterations():
        if iteration < ledger.first_iteration:
            continue
        for commit in causal_order(ledger.commits(iteration)):
            why = reasons[commit.step] or [i for i in commit.inputs if i in found]
            if why:
                found[commit.name] = (iteration, str(commit.step), commit.shard, ", ".join(why))
    return list(found.values())


def _changed(
    step: DurableStep[Any], recorded: RunConfig, given: RunConfig, inputs: Mapping[str, str], others: Mapping[str, str]
) -> list[str]:
    """Names of what a step reads and what differs."""
    options = [name for name, _, _ in differences(recorded.model_dump(mode="json"), given.model_dump(mode="json"))]
    reads = reads_under(given, step.options)
    fields = [option for option in options if is_covered(option, reads)]
    read = [*step.externals, *step.plugins, *(f"{option}:modules" for option in step.plugins)]
    differing = [name.partition(":")[0] for name in read if inputs.get(name) != others.get(name)]
    return fields + list(dict.fromkeys(differing))
