"""Execution of the policy's programs for tools: a bounded number at a time, each in a sandbox.

| how a program ends | result of the tool's call |
|---|---|
| by itself, whatever its exit code | its output |
| at its timeout, or at the limit of its output or memory | `ToolFailed` |
| its sandbox is killed from outside, or does not start, `LOST` times | `ToolUnavailable` |
| this machine has no sandboxes | `ToolUnavailable`; a `generate` call does not start then: `require_sandboxes` |
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from weakref import WeakKeyDictionary

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.rollout import PythonTool, SandboxedTool, ToolOptions
from cairn.engines.agents.tools.errors import Reason, ToolFailed, ToolUnavailable
from cairn.engines.agents.tools.results import shortened
from cairn.engines.processes.bubblewrap import Confined
from cairn.engines.processes.sandbox import LOST, Ran, Sandbox, SandboxFailed

QUEUE = 3600.0
"""Maximum seconds that a program waits for its turn."""


class Programs:
    """The programs of one tool."""

    def __init__(self, name: str, options: SandboxedTool) -> None:
        self._name = name
        self._options = options
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, execute: Callable[[Sandbox], Awaitable[Ran]]) -> Ran:
        """Run a program in a sandbox by `execute`. Raises ToolFailed and ToolUnavailable."""
        loop = asyncio.get_running_loop()
        if loop not in self._turns:
            self._turns[loop] = asyncio.Semaphore(self._options.num_workers)
        async with self._turns[loop]:
            try:
                sandbox = await asyncio.to_thread(_sandbox, _confined(self._name, self._options))
                ran = await execute(sandbox)
            except (BadPlugin, SandboxFailed) as error:
                raise ToolUnavailable(str(error)) from error
            except OSError as error:
                raise ToolUnavailable(f"{self._name}: this machine has no room for its sandbox: {error}") from error
        if ran.lost:
            raise ToolUnavailable(f"{self._name}: its sandbox was ended from outside {LOST} times")
        if ran.out_of_memory:
            raise ToolFailed(f"{self._name}: it took more memory than it may have", Reason.MEMORY)
        if ran.late:
            raise ToolFailed(f"{self._name}: it took longer than {self._options.timeout:g} s", Reason.DEADLINE)
        return ran


_sandbox = cache(Sandbox)


def require_sandboxes(tools: Sequence[str], options: ToolOptions) -> None:
    """Raise BadPlugin where one of the named tools runs programs, and this machine has no sandboxes."""
    for name, own in (("python", options.python), ("shell", options.shell)):
        if name in tools:
            _sandbox(_confined(name, own))


def _confined(name: str, options: SandboxedTool) -> Confined:
    return Confined(
        f"the tool {name!r}",
        f"rollout.tool_options.{name}.bwrap",
        options.bwrap,
        options.python if isinstance(options, PythonTool) else None,
        options.timeout,
        options.cpu_time,
        options.memory,
        options.processes,
        options.file_size,
    )


def report(output: bytes, errors: bytes, code: int, length: int) -> str:
    """Return the report of a program for the model: its output, and how it ended where it failed.

    At most `max_report_length(length)` characters.
    """
    parts = [shortened(output.decode(errors="replace").rstrip("\n"), length)]
    if code:
        text = errors.decode(errors="replace").rstrip("\n")
        if len(text) > length:  # the error is at its end
            text = f"[{len(text) - length:,} characters left out]\n{text[-length:]}"
        parts += [text, f"exit code {code}"]
    return "\n".join(part for part in parts if part)


def max_report_length(length: int) -> int:
    """Return the maximum characters of a report by `report`."""
    return 2 * length + 200
