"""Has a server without a GPU fork its scheduler and its detokenizer, which SGLang would start as new processes.

Each of those would import again what the server has imported: two thirds of the CPU time of a start. With a GPU that is
how it has to be, because a fork cannot use CUDA.
"""

import multiprocessing
from typing import Any

_set_start_method = multiprocessing.set_start_method


def _fork(method: str | None, *args: Any, **options: Any) -> None:
    """Take one method for another; everything else as it is."""
    _set_start_method("fork" if method == "spawn" else method, *args, **options)


multiprocessing.set_start_method = _fork
