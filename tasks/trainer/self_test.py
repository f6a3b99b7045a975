"""Self-test: does this kind of machine give the same bits twice?

Recovery replays committed updates and compares them with their digests. Only a trial shows whether that works on a
machine. So it is tried once on each kind: after the first iteration that a driver completes, never during a resume.

    state as committed ── save ── update ──▶ digest A
                            └─ restart, load ── update ──▶ digest B       A = B?
                                        └─ load ──▶ state as committed

The batch is that of the iteration, so lengths and layout are those of the run. Nothing of the test enters the run's
history.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.configs.digest import digest as config_digest
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineError
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, StoreError
from cairn.storage.upkeep.self_tests import SelfTest, find_self_test, record_self_test
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.versions import version_of
from cairn.tasks.trainer.recovery import committed_batch, prepare_trainer

OPTIONS = (
    "training.engine",
    "training.world_size",
    "training.num_gpus_per_rank",
    "training.num_threads",
    "training.dtype",
    "training.deterministic_mode",
    "training.gradient_checkpointing",
    "training.max_tokens_per_gpu",
    "training.lora",
    "training.megatron",
    "algorithm.loss_type",
    "algorithm.advantage_estimator",
)
"""Configuration fields that kernels and layout depend on."""


def fingerprint(config: RunConfig, model: str | None, environment: Environment) -> str:
    """Return the digest of all that a self-test's result depends on. `model`: digest of the model's folder."""
    return canonical.digest(
        {
            "environment": environment.model_dump(mode="json", exclude={"host"}),
            "options": config_digest(config, OPTIONS),
            "model": model,
        }
    )


def self_test_once(run: RunContext, trained: Commit) -> None:
    """Test the training engine's machine, unless that was done, on the batch that `trained` consumed. Afterwards the
    engine is in the state that `trained` committed or, after a failure, in one that the next step discards."""
    if run.stopping.is_set():
        return
    try:
        _self_test(run, trained)
    except (EngineError, StoreError, Damaged, OSError) as error:
        # The next step notices that the engine is in another state, and restores it.
        run.emit(Message(f"Self-test: interrupted, the next driver repeats it: {error}", "warning"))


def _self_test(run: RunContext, trained: Commit) -> None:
    environment = run.fleet.training.environment
    key = fingerprint(run.config, run.ledger.terms.inputs.get("model"), environment)
    if find_self_test(run.ledger.store, key) is not None:
        return
    run.emit(Message("Self-test: running one update twice, with a restart of the training engine between them"))
    began = time.perf_counter()
    with run.weights_lock:
        digests = _updated_twice(run, trained)
    if len(digests) < 2:
        run.emit(Message("Self-test: interrupted, the next driver repeats it: this driver must stop"))
        return
    first, second = digests
    result = SelfTest(
        fingerprint=key,
        environment=environment,
        agrees=first == second,
        state_digests=(first, second),
        run=run.ledger.run,
        iteration=trained.iteration,
        seconds=time.perf_counter() - began,
        tested_at=time.time(),
    )
    record_self_test(run.ledger.store, result, run.ledger.require_lease)
    run.emit(Message(sentence(result), "info" if result.agrees else "warning"))


def sentence(result: SelfTest) -> str:
    """Return the result of a self-test as a sentence for people."""
    if result.agrees:
        return f"Self-test: {result.environment.device} computed the same bits twice, in {result.seconds:.0f} s"
    return (
        f"Self-test: {result.environment.device} computed other bits the second time ({result.state_digests[0][:12]}…, "
        f"then {result.state_digests[1][:12]}…): after a failure, updates since the newest checkpoint cannot be "
        "replayed. Set training.deterministic_mode, checkpoint.save_interval: 1, or recovery.on_divergence: fork"
    )


def _updated_twice(run: RunContext, trained: Commit) -> list[str]:
    """Return the state digests of both updates; fewer if the driver must end meanwhile. After that only the load that
    restores the committed state begins, because this state may have to be saved."""
    training, store = run.fleet.training, run.ledger.store.url
    prepare_trainer(run, trained)
    digests: list[str] = []
    with _saved(run, trained) as folder:
        for restart in (True, False):
            if not run.stopping.is_set():
                digests.append(_update(run, trained))
                if restart and not run.stopping.is_set():
                    training.restart()
                    run.fleet.turns.for_training()
                training.load(store, folder)
    return digests


def _update(run: RunContext, trained: Commit) -> str:
    result = run.fleet.training.train(
        committed_batch(run, trained),
        num_steps=run.config.training.num_steps_per_rollout,
        expected_version=version_of(trained),
        input_digest=f"self-test of {trained.digest}",
        train_actor=True,
    )
    return result.state_digest


@contextmanager
def _saved(run: RunContext, trained: Commit) -> Iterator[str]:
    """Yield the store path of a checkpoint of the state that `trained` committed: the run's own, or one for the
    block."""
    saved = run.find(trained.iteration, Step.CHECKPOINT)
    if saved is not None:
        yield run.ledger.folder_of(saved)
        return
    attempt = run.ledger.attempt(trained.iteration, Step.CHECKPOINT, None)
    try:
        run.fleet.training.save(run.ledger.store.url, attempt.folder)
        yield attempt.folder
    finally:  # the files of a failed save too: it may have lacked their space
        attempt.discard()
