"""The tool `python`: runs a program of the policy in a sandbox without network and files, and returns its output."""

from cairn.configs.schema.rollout import PythonTool, ToolOptions
from cairn.engines.agents.tools.errors import Reason, ToolFailed
from cairn.engines.agents.tools.programs import QUEUE, Programs, max_report_length, report
from cairn.engines.agents.tools.tool import Tool


class Python:
    """Runs programs independently: no state remains between them."""

    def __init__(self, options: PythonTool) -> None:
        self._options = options
        self._programs = Programs("python", options)

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Only the standard library is there; there is no network.

        Args:
            code: the program; it has to print what is to be seen
        """
        program = code.encode(errors="surrogatepass")
        ran = await self._programs.run(lambda sandbox: sandbox.run(program, b""))
        if ran.flooded:
            raise ToolFailed(f"python: it printed more than {self._options.file_size:,} bytes", Reason.SIZE)
        return report(ran.output, ran.errors, ran.code, self._options.max_output)


def tool(options: ToolOptions) -> Tool:
    """Return the tool of a run."""
    # The program has a timeout of its own, which excludes the time in the queue.
    timeout = options.python.timeout + QUEUE
    return Tool(
        Python(options.python).python,
        kind="pure",
        timeout=timeout,
        max_output=max_report_length(options.python.max_output),
    )
