"""Self-test: does this kind of machine give the same bits twice?

Recovery replays committed updates and compares them with their digests. Only a trial shows whether that works on a
machine. So it is tried once on each kind: after the first iteration that a driver completes, never during a resume.

    state as committed ── gradients of its batch ──▶ digest A
                       └─ gradients of its batch ──▶ digest B       A = B?

Gradients pass through every kernel and collective that may add in another order. An optimizer step after them computes
each element by itself. So nothing is saved, loaded or restarted, and the test takes as long as two steps without the
optimizer. What only another process does differently, such as a kernel that it chooses by measuring, shows when a
replay diverges (`recovery.on_divergence`).

The batch is that of the iteration, so lengths and layout are those of the run. Nothing of the test enters the run's
history, and the engine's state is the committed one all the time.
"""

import time

from cairn.configs.digest import digest as config_digest
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineError
from cairn.storage.ledger.commits import Commit
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, StoreError
from cairn.storage.upkeep.self_tests import SelfTest, find_self_test, record_self_test
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.trainer.recovery import committed_batch, prepare_trainer

OPTIONS = (
    "training.engine",
    "training.world_size",
    "training.num_gpus_per_rank",
    "training.num_threads",
    "training.dtype",
    "training.deterministic_mode",
    "training.gradient_checkpointing",
    "training.sequence_packing",
    "training.context_parallel_size",
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
    engine is in the state that `trained` committed; after a failure it may have to be restored."""
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
    run.emit(Message("Self-test: computing the gradients of one batch twice"))
    began = time.perf_counter()
    with run.weights_lock:
        prepare_trainer(run, trained)
        first, second = run.fleet.training.gradient_digests(
            committed_batch(run, trained), num_steps=run.config.training.num_steps_per_rollout
        )
    result = SelfTest(
        fingerprint=key,
        environment=environment,
        agrees=first == second,
        digests=(first, second),
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
        f"Self-test: {result.environment.device} computed other bits the second time ({result.digests[0][:12]}…, "
        f"then {result.digests[1][:12]}…): after a failure, updates since the newest checkpoint cannot be "
        "replayed. Set training.deterministic_mode, checkpoint.save_interval: 1, or recovery.on_divergence: fork"
    )
