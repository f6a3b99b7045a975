"""What can go wrong in training that no restart mends."""


# What can go wrong in an engine, told apart by what helps.


class EngineError(Exception):
    """A failure of an engine that a new try, on a restarted engine where needed, can mend."""


class EngineDied(EngineError):
    """The engine's process is gone; its state is lost."""


class EngineTimeout(EngineError):
    """A call did not return within its deadline."""


class ClusterLost(EngineError):
    """The cluster that the driver started is gone, and every engine with it; or the one that it joined is out of reach.
    A new driver has to start another, or to join it again."""


class GenerationFailed(EngineError):
    """The engine lives and holds the right weights, and failed on what it was given to generate: other prompts may fare
    better. No death, deadline or lost connection is one."""


class Superseded(Exception):
    """The engine belongs to a later driver of the run and refused a call of this one, which has to stop: no new try can
    help."""


class WrongVersion(EngineError):
    """The engine holds other weights than the caller expects; nothing was changed."""


class PublicationGone(EngineError):
    """No engine can be brought to a weight version: it is not published, or not any more."""


class WeightsDiffer(EngineError):
    """An engine holds other weights than the version that it reports."""


class RequestRefused(ValueError):
    """Requests that the engine cannot serve, however often it is asked; nothing was generated."""

    def __init__(self, refused: dict[tuple[int, ...], str]) -> None:
        """`refused`: why, by the request's id."""
        self.refused = refused
        super().__init__(refused)

    def __str__(self) -> str:
        return "; ".join(
            f"request {'/'.join(map(str, id))} cannot be served: {why}" for id, why in self.refused.items()
        )


class TeacherUnusable(Exception):
    """The server of a teacher refuses what it is asked, or answers something else; a new try will not help."""


class BadModel(Exception):
    """The model folder cannot be used; a new try will not help. The message says why and what to do."""


class NotFinite(Exception):
    """The loss or the gradient of an optimizer step is infinite or not a number; that step was not taken. The same
    weights and samples give the same result, so a new try will not help: the message says what to look at."""


class GraderFailed(Exception):
    """No grader process runs: its import failed, its code is not what the run recorded, or the pool is closed."""


class GraderUnavailable(GraderFailed):
    """The machine does not let the grader work, or what it asks does not answer: a new try may help."""
