"""What can go wrong in an engine, told apart by what helps."""


class EngineError(Exception):
    """A failure of an engine that a new try, on a restarted engine where needed, can mend."""


class EngineDied(EngineError):
    """The engine's process is gone; its state is lost."""


class EngineTimeout(EngineError):
    """A call did not return within its deadline."""


class WrongVersion(EngineError):
    """The engine holds other weights than the caller expects; nothing was changed."""


class BadModel(Exception):
    """The model folder cannot be used; a new try will not help. The message says why and what to do."""
