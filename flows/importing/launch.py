"""The training command of a launch script, found without running a program of this machine.

bashkit interprets the script in this process: it has no network, no processes, and a file system of its own, in which
the script's checkout can be read. Programs such as `ray` and `python3` only record their arguments; others do nothing.
A script that takes too long or too much memory is ended.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cairn.configs.errors import BadInput
from cairn.storage.store.canonical import from_json

if TYPE_CHECKING:
    from bashkit import Bash

RECORDED = ("ray", "python", "python3", "torchrun", "accelerate", "deepspeed", "trl", "uv", "srun", "sbatch")
"""Programs that start a training, by themselves or by another one of them."""
IGNORED = (
    "pkill",
    "kill",
    "sleep",
    "nvidia-smi",
    "ssh",
    "scp",
    "rsync",
    "pip",
    "curl",
    "wget",
    "mkdir",
    "rm",
    "mv",
    "cp",
)
"""Programs that scripts call besides, which do nothing here. Further ones are added as a script calls them."""

LONGEST = 2**22
"""Maximum number of bytes of a script."""
SECONDS = 20
MOST_COMMANDS = 200_000
MOST_TRIES = 40
"""Number of runs of a script, each with what the one before it lacked."""
_ENDED: "list[Bash]" = []
"""Interpreters that were ended. They stay until the process ends, since the removal of one waits for the pipe that it
may read."""

_UNKNOWN = re.compile(r"line (\d+): (.+?): command not found", re.MULTILINE)
_MISSING = re.compile(r"line (\d+): (/.+?): No such file or directory", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """A training command."""

    program: str
    """Name of the program: `train.py`, `verl.trainer.main_ppo`, `grpo`."""
    arguments: tuple[str, ...]
    """Arguments of the program."""
    launcher: tuple[str, ...]
    """Words before the program: `accelerate launch --num_processes 8`."""
    folders: tuple[Path, ...]
    """Folders in which the program finds Python modules, as far as they are in the script's checkout."""
    notes: tuple[str, ...]
    """Sentences on what differs from a run of the script."""
    read: Callable[[str], str | None]
    """Returns the text of a file that the script has or has written; None where there is none."""


def launch_of(script: Path, environment: Mapping[str, str]) -> Launch:
    """Return the training command that a bash script runs. Raises BadInput where it runs none.

    Args:
        environment: variables that the script sees; it does not see those of this process.
    """
    script = script.absolute()
    try:
        with script.open("rb") as file:
            data = file.read(LONGEST + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"{script} cannot be read as a text file: {error}") from None
    if len(data) > LONGEST:
        raise BadInput(f"{script} is longer than {LONGEST:,} bytes, which no launch script is")
    root = _checkout(script)
    missing = {str(script): _patient(text)}
    ignored = set(IGNORED)
    notes: dict[str, None] = {}
    for _ in range(MOST_TRIES):
        calls: list[list[str]] = []
        bash = _interpreter(root, environment, missing, ignored, calls)
        result = bash.execute_sync(f"source {shlex.quote(str(script))}")
        if result.error:
            _ENDED.append(bash)
        if not _add_missing(result.stderr, root, missing, ignored, notes):
            break
    found = [launch for call in calls if (launch := _training(call, calls)) is not None]
    if not found:
        said = [line for line in (result.stdout + result.stderr).splitlines() if line and not line.startswith("+")]
        why = f": {said[-1].strip().rstrip('.')}" if said else ""
        ended = result.error or f"it ends with exit code {result.exit_code}"
        unset = sorted(_unset(text) - environment.keys())
        hint = f"; set what it reads: {' '.join(f'--env {name}=…' for name in unset)}" if unset else ""
        raise BadInput(f"{script} starts no training: {ended}{why}{hint}")
    best = max(found, key=lambda one: len(one.arguments))
    if result.exit_code and not result.error:
        notes[f"the script ended with exit code {result.exit_code} after it had started the training"] = None

    def read(path: str) -> str | None:
        file = root / path
        try:
            return None if file.exists() and not file.is_file() else str(bash.read_file(str(file)))
        except Exception:
            return None

    folders = tuple(_folders(best.words, script, root))
    return Launch(best.program, tuple(best.arguments), tuple(best.launcher), folders, tuple(notes), read)


_STOPPING = re.compile(r"^([ \t]*)set[ \t]+-\w*[eu]\w*([ \t]+(-o[ \t]+)?pipefail)?", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{\w+:?-\$\([^()]*\)\}")


def _patient(text: str) -> str:
    """Return a script that goes on where a command fails: commands that do nothing here may fail.

    Also without the quotes in the default of a variable, `"${A:-$(cd "$B")}"`, which bashkit 0.20 passes on.
    """
    text = _DEFAULT.sub(lambda match: match[0].replace('"', ""), text)
    return _STOPPING.sub(r"\1:", text)


def _checkout(script: Path) -> Path:
    """Return the folder of the repository that holds a script, or else the script's own."""
    parents = [
        folder for folder in script.parents if (folder / ".git").exists() or (folder / "scripts/models").is_dir()
    ]
    return next(iter(parents), script.parent)


def _interpreter(
    root: Path,
    environment: Mapping[str, str],
    files: Mapping[str, str],
    ignored: set[str],
    calls: list[list[str]],
) -> "Bash":
    from bashkit import Bash

    def record(context: Any) -> str:
        calls.append([context.name, *context.argv])
        return ""

    flags = {name for name in ignored if name.startswith("-")}
    return Bash(
        cwd=str(root),
        env={"HOME": "/root", **environment},
        mounts=[{"host_path": str(root), "vfs_path": str(root)}],
        allowed_mount_paths=[str(root)],
        files=dict(files),
        custom_builtins={
            **dict.fromkeys(ignored - flags, lambda context: ""),
            **dict.fromkeys((*RECORDED, *flags), record),
        },
        max_commands=MOST_COMMANDS,
        timeout_seconds=SECONDS,
    )


def _add_missing(errors: str, root: Path, missing: dict[str, str], ignored: set[str], notes: dict[str, None]) -> bool:
    """Add what a script lacked to the files and programs of its next run; return whether there was something new."""
    before = len(missing) + len(ignored)
    for line, name in _UNKNOWN.findall(errors):
        name = name.rsplit(": ", 1)[-1]
        if name.startswith("--"):
            notes[
                f"line {line}: the flags from {name} on are a command of their own, since the line before does not "
                "end with a backslash; they are read as flags of the training"
            ] = None
        ignored.add(name)
    for line, path in _MISSING.findall(errors):
        path = path.rsplit(": ", 1)[-1]
        other = root / "scripts/models" / Path(path).name
        if path not in missing and (text := _text_inside(other, root)) is not None:
            missing[path] = text
            notes[f"line {line}: {path} is not there; {other} is read in its place"] = None
    return len(missing) + len(ignored) > before


def _text_inside(file: Path, root: Path) -> str | None:
    """Return the text of a file below a folder; None where there is none, or a link that leads out of the folder."""
    try:
        if file.is_file() and file.resolve().is_relative_to(root.resolve()):
            return file.read_text("utf-8")
    except (OSError, ValueError):
        pass
    return None


class _Call(NamedTuple):
    """A call that starts a Python program."""

    program: str
    arguments: list[str]
    words: Sequence[str]
    """All words of the call."""
    launcher: Sequence[str]
    """Words before the program."""


def _training(call: Sequence[str], calls: Sequence[Sequence[str]]) -> _Call | None:
    """Return a call as one that starts a Python program; None for another call."""
    words = list(call)
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    for at, word in enumerate(words):
        if at + 1 < len(words) and (word == "-m" or word == "trl"):
            return _Call(words[at + 1], words[at + 2 :], call, words[:at])
        if word.endswith(".py"):
            return _Call(Path(word).name, words[at + 1 :] + _continued(call, calls), call, words[:at])
    return None


def _continued(call: Sequence[str], calls: Sequence[Sequence[str]]) -> list[str]:
    """Return the flags of the commands after a call that begin with a flag: see the note of `_add_missing`."""
    after = list(calls)[next(i for i, one in enumerate(calls) if one is call) + 1 :]
    return [word for one in after if one[0].startswith("--") for word in one]


def _unset(text: str) -> set[str]:
    """Return the variables of which a script tests whether they are set."""
    return set(re.findall(r"-z +\"?\$\{?(\w+)", text)) | set(re.findall(r"\$\{(\w+):?\?", text))


def _folders(call: Sequence[str], script: Path, root: Path) -> list[Path]:
    """Return the folders of a job's PYTHONPATH, and those in which a script of slime looks."""
    found = [script.parent, root]
    for word in call:
        match = re.fullmatch(r"(?:--runtime-env-json=)?(\{.*\})", word, re.DOTALL)
        if match:
            try:
                paths = str(from_json(match[1])["env_vars"]["PYTHONPATH"])
            except (ValueError, LookupError, TypeError):
                continue
            found = [Path(path) for path in paths.split(":") if path] + found
    return list(dict.fromkeys(found))
