"""What the tools of ours are given: `rollout.tool_options`. Those of yours say it themselves, see docs/agents.md."""

from pydantic import Field

from cairn.configs.schema.base import Section
from cairn.configs.schema.location import Location


class SandboxedTool(Section):
    """A tool that runs programs of the policy, each in a sandbox of bubblewrap."""

    bwrap: str = "bwrap"
    """The program `bwrap`: a name on PATH, or its path."""

    timeout: float = Field(10.0, gt=0)
    """Seconds on the wall clock that a program may take."""

    cpu_time: int = Field(10, ge=1)
    """Seconds of CPU time of each of its processes."""

    memory: int = Field(512 * 1024**2, ge=2**26)
    """Bytes of address space of each process, and of memory of all of them together."""

    processes: int = Field(64, ge=1)
    """Processes and threads that it may have."""

    file_size: int = Field(16 * 1024**2, ge=4096)
    """Bytes of one file, of its scratch folder, of /dev/shm, and of what it prints."""

    max_output: int = Field(16_384, ge=1)
    """Characters of what it prints that the model is told."""

    num_workers: int = Field(4, ge=1)
    """Programs that run at a time, beside each rollout engine; the others wait, which counts for none of the limits."""


class PythonTool(SandboxedTool):
    """`python`: a Python program, and what it prints."""

    python: str | None = None
    """The interpreter, by its path; by default the one that runs Cairn. Programs see its standard library and no
    installed package."""


class SearchTool(Section):
    """`search`: passages of a corpus that go with a query, by BM25."""

    corpus: Location | None = Field(None, min_length=1)
    """JSONL or Parquet file with a passage a row; to be set where the tool is named."""

    text_key: str = "text"
    """Column with the passage."""

    title_key: str | None = None
    """Column with its title, which is searched and shown too."""

    k: int = Field(3, ge=1, le=100)
    """Passages that are returned."""

    max_output: int = Field(16_384, ge=1)
    """Characters that the model is told."""

    timeout: float = Field(30.0, gt=0)
    """Seconds that a search may take; reading the corpus, the first time, does not count."""


class ToolOptions(Section):
    """Options of the tools of ours that `rollout.tools` names, and what tools of yours may do."""

    network: bool = False
    """Whether tools of yours that are called in processes of their own may reach a network: plain functions of modules.
    Others run in the process of `generate`, whose network they have."""

    python: PythonTool = PythonTool()
    """Of `python`."""

    shell: SandboxedTool = SandboxedTool()
    """Of `shell`."""

    search: SearchTool = SearchTool()
    """Of `search`."""
