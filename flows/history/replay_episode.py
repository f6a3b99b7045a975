"""`cairn episode --replay`: run the code of one sample again, from its record, in this process.

No engine or service is called: every call through the sample's context is served from `calls.parquet`. The function is
the run's, looked up by name. It may have changed since, which is reported but not an error: finding such changes is the
purpose.
"""

import bdb
import dis
import inspect
import pdb
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from cairn.configs.errors import BadInput
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.context import Context, EpisodeOptions
from cairn.engines.agents.episodes.offline import NotRecorded, replay
from cairn.engines.agents.episodes.recorder import EpisodeDiverged
from cairn.engines.agents.episodes.runner import Generate, error_message
from cairn.engines.agents.tools.tool import load_tools
from cairn.engines.agents.user_process import load_generate
from cairn.engines.models.tokenizers import read_tokenizer, stop_clock
from cairn.engines.types.trajectories import (
    BadTrajectory,
    CallRecord,
    GeneratedSample,
    SampleRequest,
    Segment,
    Trajectory,
)
from cairn.engines.types.types import FinishReason
from cairn.flows.driver.trust import recorded_config
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import redacted_samples
from cairn.storage.records import Record
from cairn.tasks.durable.plugin_sources import digest_of_all, source_digest
from cairn.tasks.durable.recorded_run import RecordedRun
from cairn.tasks.generation.groups import unfinished_group
from cairn.tasks.generation.rollout import sampling_params

_OPTION = "rollout.custom_generate_function_path"


class NotReplayable(BadInput):
    """The record that the replay needs is missing. The message contains the reason."""


class EpisodeReplayed(Record):
    """Result of a replayed episode."""

    outcome: Literal["same", "differs", "failed", "diverged"]
    """Whether the trajectory is equal to the committed one, bit for bit; *failed*: the code raised an error;
    *diverged*: it made other calls than the recorded ones."""
    told: str
    """First difference, or why the code ended; empty where all is equal."""
    changed: bool
    """Whether the source of the function, or of the run's tools, differs from the run's."""
    answers: int
    """Number of responses that the code received."""


def replay_episode(
    ledger: Ledger,
    iteration: int,
    shard: str | None,
    key: tuple[int, int],
    *,
    on_response: Callable[[CallRecord], None] = lambda record: None,
    debugger: bool = False,
) -> EpisodeReplayed:
    """Run the code of a sample again. `on_response` is called with each response that the code receives; with
    `debugger`, the code stops in the terminal's debugger at its first line, and where it raises.

    Raises NotReplayable, ConfigError where the code is not in a working folder (`cairn.flows.driver.trust`), BadPlugin,
    Damaged, Retired, and bdb.BdbQuit where the person leaves the debugger.
    """
    config = recorded_config(ledger)
    run = RecordedRun(config, ledger)
    commit = run.committed(iteration, Step.ROLLOUT, shard)
    if (decision := redacted_samples(ledger).get(commit.name)) is not None:
        raise NotReplayable(f"decision {decision} has redacted samples of {commit.name}: its record is incomplete")
    rows = run.read(commit).filter(pc.field("group_id") == key[0])
    calls = run.calls(commit)
    if calls is None:
        raise NotReplayable(
            f"no calls are recorded for the samples of {commit.name}: {config.rollout.custom_generate_function_path} "
            "makes only one call of the policy, or ran before Cairn recorded calls"
        )
    group = unfinished_group(rows, run.images(commit), calls)
    committed, error = group.parts[key[1]], rows.to_pylist()[list(group.parts).index(key[1])]["error"]
    if committed.finish_reason == FinishReason.ABORT:
        raise NotReplayable(f"the sample is not finished in {commit.name}: a later shard continues it")
    row = group.prompt
    sample = SampleRequest(
        *key,
        row.prompt_ids,
        group.seeds[key[1]],
        prompt=row.prompt_text,
        label=row.label,
        metadata=row.metadata or {},
        images=row.images,
        recorded=tuple(record for record in group.recorded if record.key == key),
    )
    return _replayed(ledger, config, sample, committed, error, on_response, debugger)


def _replayed(
    ledger: Ledger,
    config: RunConfig,
    sample: SampleRequest,
    committed: GeneratedSample,
    error: str | None,
    on_response: Callable[[CallRecord], None],
    debugger: bool,
) -> EpisodeReplayed:
    name = config.rollout.custom_generate_function_path
    changed = "." in name and source_digest(name) != ledger.terms.plugin_digest(_OPTION)
    tools = [tool for tool in config.rollout.tools if "." in tool]
    if tools and digest_of_all(map(source_digest, tools)) != ledger.terms.plugin_digest("rollout.tools"):
        changed = True
    function, options = load_generate(name), EpisodeOptions.of(config)
    answers = 0

    def count(record: CallRecord) -> None:
        nonlocal answers
        answers += 1
        on_response(record)

    def ended(outcome: Literal["same", "differs", "failed", "diverged"], why: str = "") -> EpisodeReplayed:
        return EpisodeReplayed(outcome=outcome, told=why, changed=changed, answers=answers)

    try:
        replayed = replay(
            sample,
            _stopping_in(function) if debugger else function,
            sampling_params(config, with_support=False),
            tokenizer=cache(partial(_tokenizer, ledger, config)),
            tools=cache(lambda: load_tools(options.tools, options.tool_options)),
            options=options,
            on_received=count,
        )
    except (KeyboardInterrupt, bdb.BdbQuit):
        raise
    except (NotRecorded, EpisodeDiverged, BadTrajectory) as problem:
        return ended("diverged", str(problem))
    # This runs user code: any exception that it raises is a result.
    except BaseException as problem:
        if debugger:
            _debug(problem)
        message = error_message(problem, function)
        return ended("failed", f"it failed as it did then: {message}" if message == error else message)
    if error is not None:
        return ended("differs", f"it ended with a trajectory, but is committed as failed: {error}")
    difference = first_difference(committed, replayed)
    return ended("same") if difference is None else ended("differs", difference)


def _tokenizer(ledger: Ledger, config: RunConfig) -> Any:
    tokenizer = read_tokenizer(config.model.path)
    stop_clock(tokenizer, ledger.manifest.created_at)
    return tokenizer


def first_difference(committed: GeneratedSample, replayed: GeneratedSample) -> str | None:
    """Return a sentence on the first difference between the replayed and the committed sample; None where every bit is
    equal."""
    count, expected = len(replayed.trajectories), len(committed.trajectories)
    if count != expected:
        return f"it made {count} trajectories, but {expected} are committed"
    for number, (one, other) in enumerate(zip(replayed.trajectories, committed.trajectories, strict=True)):
        where = f" of trajectory {number}" if count > 1 else ""
        if not _same_prompt(one.prompt_ids, other.prompt_ids):
            return f"the prompt{where or ' of the trajectory'} differs"
        if (one.reward, one.role) != (other.reward, other.role):
            what = f"({one.reward}, {one.role}), but ({other.reward}, {other.role}) are committed"
            return f"reward and role{where or ' of the trajectory'} are {what}"
        segments, expected_segments = _segments(one), _segments(other)
        for place, pair in enumerate(zip(segments, expected_segments, strict=False)):
            if (difference := _segment_difference(*pair)) is not None:
                return f"segment {place}{where} {difference}"
        if len(segments) != len(expected_segments):
            return f"it made {len(segments)} segments{where}, but {len(expected_segments)} are committed"
    return None


def _segments(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if len(segment)]


def _same_prompt(replayed: Any, committed: Any) -> bool:
    if replayed is None or committed is None:
        return replayed is committed
    return np.array_equal(replayed, committed)


def _segment_difference(replayed: Segment, committed: Segment) -> str | None:
    if replayed.call != committed.call:
        source, expected = (
            "is from the environment" if id is None else f"is call {id}" for id in (replayed.call, committed.call)
        )
        return f"{source}, but the committed one {expected}"
    for what, one, then in (
        ("token", replayed.ids, committed.ids),
        ("loss mask", replayed.loss_mask, committed.loss_mask),
        ("log-prob", replayed.log_probs, committed.log_probs),
        ("weight version", replayed.weight_versions, committed.weight_versions),
    ):
        if one is None or then is None:
            continue
        if len(one) != len(then):
            return f"has {len(one)} tokens, but the committed one has {len(then)}"
        (places,) = np.nonzero(one != then)
        if len(places):
            at = int(places[0])
            return f"differs first at its token {at}: the {what} is {one[at]}, but {then[at]} is committed"
    if replayed.reward != committed.reward:
        return f"has the reward {replayed.reward}, but {committed.reward} is committed"
    if (replayed.seed, replayed.finish_reason) != (committed.seed, committed.finish_reason):
        return (
            f"ended with {replayed.finish_reason}, seed {replayed.seed}, but the committed one with "
            f"{committed.finish_reason}, seed {committed.seed}"
        )
    return None


def _stopping_in(function: Generate) -> Generate:
    """Return the function with a debugger breakpoint at its first line."""
    code = inspect.unwrap(function).__code__
    lines = [line for _, line in dis.findlinestarts(code) if line is not None and line > code.co_firstlineno]

    async def generate(context: Context, sample: SampleRequest) -> Trajectory | list[Trajectory]:
        debugger = pdb.Pdb(nosigint=True)
        debugger.reset()
        debugger.botframe = sys._getframe()  # the debugger stops in no frame outside it
        problem = debugger.set_break(code.co_filename, next(iter(lines), code.co_firstlineno), temporary=True)
        if problem:
            raise NotReplayable(f"the debugger cannot stop in {Path(code.co_filename).name}: {problem}")
        debugger.set_continue()
        sys.settrace(debugger.trace_dispatch)
        try:
            return await function(context, sample)
        finally:
            sys.settrace(None)

    return generate


def _debug(problem: BaseException) -> None:
    """Open the debugger where the error was raised."""
    print(f"{type(problem).__name__}: {problem}")
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(None, problem.__traceback__)
