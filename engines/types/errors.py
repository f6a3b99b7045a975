"""Errors of engines, graders and training; each class says whether a retry can help."""

from cairn.configs.errors import BadInput, Failure


class EngineError(Failure):
    """A failure of an engine that a retry can fix, on a restarted engine where needed."""


class EngineDied(EngineError):
    """The engine's process is gone; its state is lost."""


_DEVICE_ERRORS = ("AcceleratorError", "DistBackendError")
"""Names of PyTorch's classes of errors of a GPU and of NCCL."""

_DEVICE_MESSAGES = ("CUDA error", "cuDNN error", "CUBLAS_STATUS_", "NCCL error", "uncorrectable ECC error")


def is_device_failure(error: BaseException) -> bool:
    """Return whether an error comes from a GPU or from NCCL, after which a process can compute nothing more.

    A lack of memory is none: the process can still be used, and the same work would lack memory again.
    """
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return False
    if any(cls.__name__ in _DEVICE_ERRORS for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_MESSAGES)


class EngineTimeout(EngineError):
    """A call did not return within its timeout."""


class ClusterLost(EngineError):
    """The cluster that the driver started is gone, with every engine, or the cluster that it joined is unreachable. A
    new driver has to start another one, or to join it again."""


class GenerationFailed(EngineError):
    """The engine is alive with the right weights, but failed to generate from its input: other prompts may succeed. A
    dead engine, a timeout or a lost connection raises another error."""


class Superseded(Failure):
    """The engine belongs to a later driver of the run and refused a call of this one, which has to stop: no retry can
    help."""


class WrongVersion(EngineError):
    """The engine holds other weights than the caller expects; nothing was changed."""


class PublicationGone(EngineError):
    """A weight version is not published, or not any more, so that no engine can load it."""


class WeightsDiffer(EngineError):
    """An engine holds other weights than the version that it reports."""


class RequestRefused(ValueError):
    """Requests that the engine cannot serve, with any number of retries; nothing was generated."""

    def __init__(self, refused: dict[tuple[int, ...], str]) -> None:
        """Store the reasons of refusal, by request id."""
        self.refused = refused
        super().__init__(refused)

    def __str__(self) -> str:
        return "; ".join(
            f"request {'/'.join(map(str, id))} cannot be served: {why}" for id, why in self.refused.items()
        )


class TeacherUnusable(Failure):
    """A teacher's server refuses a request, or its response is invalid; a retry will not help."""


class BadModel(BadInput):
    """The model folder cannot be used; a retry will not help. The message gives the reason and the remedy."""


class NotFinite(Failure):
    """The loss or the gradient of an optimizer step is infinite or NaN; the step was not applied. The same weights and
    samples give the same result, so a retry will not help: the message says what to check."""


class GraderFailed(Failure):
    """No grader process runs: its import failed, its code differs from what the run recorded, or the pool is closed."""


class GraderUnavailable(GraderFailed):
    """The machine prevents the grader from working, or a service that it calls does not respond: a retry may help."""
