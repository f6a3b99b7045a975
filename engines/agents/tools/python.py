"""`python`: a program of the policy, in a sandbox without network and files, and what it prints."""

from cairn.configs.schema.rollout import PythonTool, ToolOptions
from cairn.engines.agents.tools.errors import Reason, ToolFailed
from cairn.engines.agents.tools.programs import QUEUE, Programs, longest, told
from cairn.engines.agents.tools.tool import Tool


class Python:
    """Runs programs, each by itself: nothing is left of one for the next."""

    def __init__(self, options: PythonTool) -> None:
        self._options = options
        self._programs = Programs("python", options)

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Only the standard library is there; there is no network.

        Args:
            code: the program; it has to print what is to be seen
        """
        ran = await self._programs.run(code.encode(errors="surrogatepass"))
        if ran.flooded:
            raise ToolFailed(f"python: it printed more than {self._options.file_size:,} bytes", Reason.SIZE)
        return told(ran.output, ran.errors, ran.code, self._options.max_output)


def tool(options: ToolOptions) -> Tool:
    """The tool of a run."""
    # The program has a deadline of its own, which its turn in the queue does not count for.
    timeout = options.python.timeout + QUEUE
    return Tool(
        Python(options.python).python, kind="pure", timeout=timeout, max_output=longest(options.python.max_output)
    )
