"""The tool `shell`: commands in a directory of the episode, in a sandbox without network and other files.

The episode's memory holds the directory as an archive. Each command runs in a sandbox of its own, with the archive
unpacked, and the result becomes the new archive. So nothing needs cleanup, and the size is bounded. A command that
exceeds a limit has no effect: the directory stays unchanged.

A command can change nothing else, so the tool is `deterministic`: after a crash the recorded commands rebuild the
directory, and their results are compared with the record. A command that prints the time, or uses random numbers, then
ends its episode.
"""

from cairn.configs.schema.rollout import SandboxedTool, ToolOptions
from cairn.engines.agents.tools.errors import Reason, ToolFailed
from cairn.engines.agents.tools.programs import QUEUE, Programs, max_report_length, report
from cairn.engines.agents.tools.tool import Tool

_SCRIPT = """
mkdir work && cd work || exit 1
if [ "$1" = begun ]; then tar -xf - || exit 1; fi
/bin/sh -c "$2" </dev/null >&2 2>&1
code=$?
tar --create --file - --sort name . || exit 2
printf %4d $code
"""
"""The archive arrives on stdin and leaves on stdout, followed by the command's exit code; the command's output goes to
stderr."""
_CODE = 4
"""Size of the exit code in bytes."""


class Shell:
    """The directory of an episode."""

    def __init__(self, programs: Programs, options: SandboxedTool) -> None:
        self._programs = programs
        self._options = options
        self._archive = b""

    async def shell(self, command: str) -> str:
        """Runs a command of the shell and returns what it prints. Files in the current directory stay for the next
        command; there is no network.

        Args:
            command: as for sh -c
        """
        if "\0" in command:
            raise ToolFailed("shell: a command holds no null characters", Reason.ARGUMENTS)
        archive = self._archive
        words = ["/bin/sh", "-c", _SCRIPT, "shell", "begun" if archive else "fresh", command]
        ran = await self._programs.run(lambda sandbox: sandbox.execute(words, archive))
        if ran.flooded or ran.code == 2:
            raise ToolFailed(
                f"shell: it printed or left more than {self._options.file_size:,} bytes; the directory is as it was",
                Reason.SIZE,
            )
        if ran.code:
            raise ToolFailed("shell: its sandbox has no room for the directory", Reason.SIZE)
        self._archive, code = ran.output[:-_CODE], int(ran.output[-_CODE:])
        return report(ran.errors, b"", code, self._options.max_output)


def tool(options: ToolOptions) -> Tool:
    """Return the tool of a run; each episode has its own state."""
    programs = Programs("shell", options.shell)

    def fresh() -> Tool:
        # The command has a timeout of its own, which excludes the time in the queue.
        return Tool(
            Shell(programs, options.shell).shell,
            kind="deterministic",
            timeout=options.shell.timeout + QUEUE,
            max_output=max_report_length(options.shell.max_output),
            fresh=fresh,
        )

    return fresh()
