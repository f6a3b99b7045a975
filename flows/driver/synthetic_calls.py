"""Synthetic calls: a recipe's own grader and filter are called on one synthetic sample, in processes with a deadline.

The sample has the prompt, label and metadata of the data's first row, and the label as its response. A generate
function is not called, since it talks to an engine: `cairn.configs.kinds` checks how it can be called.

| the call | is |
|---|---|
| ends in an error of programming, such as a missing attribute | a problem |
| the same, but a generate function of the user's makes the samples, and may add what is missing | a note |
| ends in another error: the response may be at fault, or a service that is not reachable | a note |
| would be paid for: the grader's answers are stored | not made |
"""

import os
import re
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.run import RunConfig
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.engines.processes.child import Child, die_with
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.tasks.data.opening import open_data
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.opening import grader_args, stores_answers
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.selecting.filters import get_filter, takes_samples

_OF_PROGRAMMING = re.compile(r"(Attribute|Type|Name|Import|ModuleNotFound|UnboundLocal)Error|BadPlugin")
_START_TIMEOUT = 60.0
"""Seconds that a filter's process may take to import it."""


def synthetic_call_problems(config: RunConfig, note: Callable[[str], None]) -> list[str]:
    """Return sentences on problems that a call of the recipe's own grader or filter shows. `note` is called with
    others."""
    if not config.samples_responses:
        return []
    problems = []
    generates = "." in config.rollout.custom_generate_function_path
    for option, name, error in _failures(config):
        sentence = f"{option}: {name!r} fails on a synthetic sample of the first row with {error}"
        if _OF_PROGRAMMING.match(error) and not generates:
            problems.append(f"{sentence}; correct it")
        else:
            note(sentence)
    return problems


def _failures(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    grader, keep = config.reward.custom_rm_path, config.rollout.dynamic_sampling_filter
    calls_grader = grader is not None and not stores_answers(config.reward)
    if not calls_grader and "." not in (keep or ""):
        return
    row, tokenizer = _first_row(config), load_tokenizer(config.model.path)
    response = row.label or "An answer."
    ids = tuple(tokenizer(response, add_special_tokens=False)["input_ids"])
    known: dict[str, Any] = {"response_ids": ids, "prompt": row.prompt_text, "prompt_ids": tuple(row.prompt_ids)}
    metadata, components = row.metadata or {}, dict[str, Any]()
    if grader is not None and calls_grader:
        sample = Sample(response, row.label, metadata, response_with_special_tokens=response, **known)
        count = config.rollout.n_samples_per_prompt if config.reward.group_rm else 1
        own = config.reward.model_copy(update={"num_workers": 1})
        with GraderPool(own, GraderRetries(retries=0), grader_args(config)) as pool:
            try:
                graded = pool.grade([sample] * count, [0] * count)
                error, components = graded[0].error, graded[0].components or {}
            except (GraderFailed, GraderUnavailable) as failure:
                error = str(failure)
        if error is not None:
            yield "reward.custom_rm_path", grader, error
    if keep is not None and "." in keep:
        mask, zeros = (1,) * len(ids), (0.0,) * len(ids)
        samples = [
            GradedSample(
                *(response, row.label, metadata),
                **known,
                sample_index=i,
                reward=float(i),
                components=components,
                loss_mask=mask,
                log_probs=zeros,
            )
            for i in range(2)
        ]
        if (error := _filter_error(config, samples)) is not None:
            yield "rollout.dynamic_sampling_filter", keep, error


def _first_row(config: RunConfig) -> PromptRow:
    data = open_data(config, load_tokenizer(config.model.path))
    if isinstance(data, PromptData):
        return data.row(0)
    return PromptRow(0, (1,), "A question.", "A question.", None, None)


def _filter_error(config: RunConfig, samples: list[GradedSample]) -> str | None:
    child = Child(__name__, [config.model_dump_json()])
    try:
        child.connection.send(samples)
        for seconds in (_START_TIMEOUT, config.reward.rm_timeout):
            if not child.connection.poll(seconds):
                return f"no result within {seconds:g} s"
            received: str | None = child.connection.recv()
        return received
    except (EOFError, OSError):
        return "the end of its process"
    finally:
        child.kill()


def main(connection_fd: int, parent: int, config: str) -> None:
    """Call the filter of a configuration on the samples of a message; reply once before and once after."""
    die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    samples: list[GradedSample] = connection.recv()
    run = RunConfig.model_validate_json(config)
    name = run.rollout.dynamic_sampling_filter
    decide, whole = get_filter(name, run), takes_samples(name)
    connection.send(None)
    try:
        decide(samples if whole else np.asarray([sample.reward for sample in samples]))
    except (Exception, SystemExit) as error:  # user code may raise any exception
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send(None)
