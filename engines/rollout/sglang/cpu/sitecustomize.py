"""Make a server without a GPU fork its scheduler and its detokenizer, which SGLang would start as new processes.

Each new process would import again what the server has imported, which takes two thirds of the CPU time of a start.
With a GPU it has to be a new process, because a fork cannot use CUDA.
"""

import multiprocessing
from typing import Any

_set_start_method = multiprocessing.set_start_method


def _fork(method: str | None, *args: Any, **options: Any) -> None:
    """Set the start method, with "fork" in place of "spawn"."""
    _set_start_method("fork" if method == "spawn" else method, *args, **options)


multiprocessing.set_start_method = _fork
