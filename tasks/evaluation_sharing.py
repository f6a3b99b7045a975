"""What the evaluations of runs have in common with the results in `evals/` (`cairn.storage.evals`).

| found in `evals/` when a run's step begins | the step |
|---|---|
| a result, each sample graded, computed on what the run computes on | takes it: nothing is sampled or graded |
| another result | samples; that result stays the one that others are shown |
| nothing, or what an ended process left | claims it, samples, puts its own there, and then commits |
| nothing, and somebody who computes it | samples too: a run waits for nobody |

A result is put there before the step's own commit: who is killed between the two finds it. Either way the step commits
the same rows and metrics wherever an engine is batch-invariant, for a result's key holds all else that they depend on;
where it is not, a result is as good as what the engine would sample now. What came from `evals/` says so, by the value
`found`.

Nothing is shared of what a key does not tell: of samples that go through user code, and of servers that somebody else
starts or that are of several kinds. Neither is a result with failed samples, which may succeed another time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from cairn.configs.schema.engine_options import EngineOptions
from cairn.engines.fingerprint import combined
from cairn.engines.tokenizers import tokenizer_digest
from cairn.storage.commits import Commit, Environment, Step
from cairn.storage.errors import Damaged, LeaseLost, StoreError, StoreRefused
from cairn.storage.evals import Claim, Evaluation, EvaluationKey, look, read_samples
from cairn.storage.layout import commit_name
from cairn.tasks.context import RunContext
from cairn.tasks.environment import changes
from cairn.tasks.evaluated_rows import SAMPLES, Answers, evaluated_rows, evaluated_samples, found_answers
from cairn.tasks.events import Message
from cairn.tasks.questions import Questions
from cairn.tasks.rewards.grading import Grading
from cairn.tasks.step import StepCall
from cairn.tasks.versions import version_of

SINGLE_TURN = "single_turn"


class Shared:
    """A result that the step may take, or is to leave."""

    def __init__(self, step: StepCall, weights: Commit | None, questions: Questions, key: EvaluationKey) -> None:
        self._step, self._weights, self._questions = step, weights, questions
        self._key = key
        self._began = time.time()
        self.claim: Claim | None = None
        """None where the result is there, or is somebody else's to compute."""

    @property
    def folder(self) -> str:
        """Store path of the result: of one key, and of all who have it."""
        return self._key.folder

    def taken(self, found: Evaluation) -> Answers | None:
        """The answers of a result; None where it is not to be taken."""
        run = self._step.run
        if found.metrics.get("failed") != 0 or any(changes(found.environment, engines_environment(run))):
            return None
        rows = read_samples(self._step.attempt.store, found).to_pylist()
        seeds = [(one.group_id, one.index, one.seed) for one in self._questions.requests()]
        if seeds != [(row["prompt_index"], row["sample_index"], row["seed"]) for row in rows]:
            return None
        if any(row["log_probs"] is None for row in rows):  # it was taken over from a run that kept none
            return None
        origin = found.origin
        whose = f"run {origin['run']}" if "run" in origin else f"{origin.get('model', 'a model')}"
        run.emit(Message(f"{self._questions.name}: found in {self.folder}, evaluated for {whose}; nothing is sampled"))
        return found_answers(rows)

    def leave(self, answers: Answers, grader: Grading) -> None:
        """Put the step's answers there, for everybody."""
        if any(one.reward is None for one in answers.graded):
            return
        if self.claim is None:  # whoever had it may have ended
            found = look(self._step.attempt.store, self._key)
            if isinstance(found, Claim):
                with found:
                    self._commit(found, answers, grader)
            return
        self._commit(self.claim, answers, grader)

    def _commit(self, claim: Claim, answers: Answers, grader: Grading) -> None:
        run, questions = self._step.run, self._questions
        rows = evaluated_rows(questions, questions.requests(), answers, grader.name, grader.version)
        attempt = claim.attempt()
        try:
            claim.commit(
                attempt,
                outputs=(attempt.write_table(SAMPLES, rows),),
                metrics=questions.measure(evaluated_samples(rows)),
                values=questions.described,
                origin=_origin(run, self._weights),
                timings={"run": time.time() - self._began},
                started_at=self._began,
                environment=engines_environment(run),
                adopted=f"{run.ledger.run}/{commit_name(self._step.iteration, Step.EVAL, self._step.shard)}",
            )
        except LeaseLost:  # this process was suspended meanwhile: another one makes the result
            attempt.discard()
        except Exception as error:
            if not isinstance(error, StoreError) or isinstance(error, StoreRefused):
                attempt.discard()
            raise


@contextmanager
def sharing(
    step: StepCall, weights: Commit | None, questions: Questions
) -> Iterator[tuple[Shared | None, Answers | None]]:
    """What the step has in common with others: None where nothing; and the answers that it takes, if they are there.
    `weights`: the train step that left what is evaluated; None: the initial ones."""
    key = _key(step.run, weights, questions)
    if key is None:
        yield None, None
        return
    shared = Shared(step, weights, questions, key)
    try:
        found = look(step.attempt.store, key)
        if isinstance(found, Evaluation):
            answers = shared.taken(found)
    except Damaged as error:
        step.run.emit(Message(f"{questions.name}: {error}; it is passed over, see `cairn verify --evals`", "warning"))
        yield None, None
        return
    if isinstance(found, Evaluation):
        yield (shared, answers) if answers is not None else (None, None)
    elif isinstance(found, Claim):
        with found:
            shared.claim = found
            yield shared, None
    else:
        yield shared, None


def engines_environment(run: RunContext) -> Environment:
    """What all rollout engines of a run compute on."""
    return combined([run.fleet.generating_environment(engine) for engine in run.fleet.membership.serving()])


def _key(run: RunContext, weights: Commit | None, questions: Questions) -> EvaluationKey | None:
    """None where a key would not tell all."""
    rollout = run.config.rollout
    if rollout.custom_generate_function_path != SINGLE_TURN or rollout.server_groups or rollout.external_urls:
        return None
    options = EngineOptions.of_run(rollout, {})
    folder = run.config.model.path
    if weights is None:
        digest: object = _checksum(folder, options.dtype)
    else:
        synced = run.find(weights.iteration, Step.SYNC)
        digest = None if synced is None else synced.values.get("digest")
    if not isinstance(digest, str):
        return None
    return questions.key(digest, tokenizer_digest(run.tokenizer), options, folder)


def _origin(run: RunContext, weights: Commit | None) -> dict[str, Any]:
    origin: dict[str, Any] = {"run": run.ledger.run, "iteration": None, "weight_version": version_of(weights)}
    if weights is not None:
        synced = run.committed(weights.iteration, Step.SYNC)
        origin |= {"iteration": weights.iteration, "publication": f"{synced.run}/{synced.name}@{synced.digest}"}
    return origin


@cache
def _checksum(folder: str, dtype: Literal["float32", "bfloat16"]) -> str:
    """Of the model that a run begins with; read once a driver, which has held it against the run's digest of it."""
    from cairn.engines.weights.folders import folder_checksum  # PyTorch takes seconds to import

    return folder_checksum(folder, dtype)
