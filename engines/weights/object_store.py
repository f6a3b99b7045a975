"""Weights travel through Ray's object store: from the training engine in buckets, each read by every rollout engine."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from engines.rollout.handle import RolloutHandle
from engines.training.handle import TrainingHandle


def send_weights(source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, *, bucket_bytes: int) -> None:
    """Replace the weights of the targets by those of `version`, the next bucket packed while the last one is loaded.

    Two buckets exist at a time. A target whose update breaks off serves nothing until another one ends.

    Raises:
        WrongVersion: the source does not stand at `version`.
        EngineError: an engine died, hung or refused.
    """
    with ExitStack() as held:
        for target in targets:
            held.enter_context(target.alone())
        _on_each(targets, "begin_weight_update", version)
        with closing(source.export_weights(version, bucket_bytes)) as buckets:
            for bucket in buckets:
                _on_each(targets, "update_weights", bucket)
        _on_each(targets, "end_weight_update")


def _on_each(targets: Sequence[RolloutHandle], method: str, *args: object) -> None:
    calls = [(target, target.submit(method, *args)) for target in targets]
    for target, call in calls:
        target.finish(call, method)
