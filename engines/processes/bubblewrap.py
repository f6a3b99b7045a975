"""The command that runs a program in a sandbox of bubblewrap, and the check that this machine has sandboxes.

Where the caller is root, the sandbox runs as `NOBODY`: many kernel files grant access to root by its user id alone, so
a program that reaches such a file does so as nobody. Parts of the interpreter that nobody cannot read, such as those
below /root, are first mounted by root at /sys, in a mount namespace that only the sandbox sees.
"""

import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cairn.configs.plugins import BadPlugin
from cairn.engines.processes.bounds import Bounds, counted_by_the_kernel

# A seccomp filter for untrusted programs: it refuses the kernel interfaces that no namespace isolates.
#
# | refused | reason |
# |---|---|
# | keys | a program has the session keyring of the user who starts it |
# | sockets other than UNIX, IPv4, IPv6 and netlink | `AF_VSOCK` reaches a virtual machine's host from any namespace |
# | io_uring | its operations bypass filters |
# | memory that no process holds (`memfd_create`, System V) | without a cgroup nothing would limit it |
# | tracing, bpf, perf events, userfaultfd | a program needs none of them, and they had kernel vulnerabilities |
# | calls of another instruction set | their numbers mean something else; the process is killed |


_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_EPERM, _EAFNOSUPPORT = 1, 97
_X32 = 0x40000000
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK."""

# add_key, request_key, keyctl; ptrace, process_vm_readv, process_vm_writev; bpf, perf_event_open, userfaultfd;
# shmget, msgget, semget; memfd_create, memfd_secret; io_uring_setup, io_uring_enter, io_uring_register
_REFUSED = {
    "x86_64": (248, 249, 250, 101, 310, 311, 321, 298, 323, 29, 68, 64, 319, 447, 425, 426, 427),
    "aarch64": (217, 218, 219, 117, 270, 271, 280, 241, 282, 194, 186, 190, 279, 447, 425, 426, 427),
}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@cache
def seccomp_filter() -> bytes:
    """Return the filter in the format of `bwrap --seccomp`. Raises BadPlugin where it does not support the machine."""
    machine = platform.machine()
    if machine not in _REFUSED:
        raise BadPlugin(f"programs run only in a sandbox, which does not support {machine}: use x86_64 or aarch64")
    refuse = [(_RETURN, 0, 0, _REFUSE | _EPERM)]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        *refuse,
    ]
    for number in _REFUSED[machine]:
        program += [(_EQUAL, 0, 1, number), *refuse]
    program += [(_EQUAL, 1, 0, _SOCKET[machine]), *allow, (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for family in _FAMILIES:
        program += [(_EQUAL, 0, 1, family), *allow]
    program.append((_RETURN, 0, 0, _REFUSE | _EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


SCRATCH = "/scratch"
NOBODY = 65534
"""User and group id of a program within the sandbox, and also outside where the caller is root."""
_STAGE = "/sys"
"""Mount point for the interpreter; nothing else in that namespace uses it."""
_DESCRIPTORS = 256
"""Maximum number of open files of a process."""
_PROBE = 120.0
"""Maximum seconds of the test that the sandbox works."""
_COUNTS_BY_NAMESPACE = (5, 14)
"""Version of Linux from which `RLIMIT_NPROC` counts only the processes of a user in their namespace."""
_HIDDEN = ("/proc/keys",)
_WORKS = "print('works')"


@dataclass(frozen=True)
class Confined:
    """Limits of a program, and its owner."""

    user: str
    """Owner, for error messages: `the grader 'code'`."""
    bwrap_option: str
    """Name of the option that configures `bwrap`."""
    bwrap: str
    """Name or path of the bubblewrap executable."""
    python: str | None
    """Path of the interpreter; None uses this process's own."""
    seconds: float
    """Maximum wall-clock seconds."""
    cpu_time: int
    """Maximum seconds of CPU time."""
    memory: int
    """Maximum bytes of address space of each process, and of memory of all processes."""
    processes: int
    """Maximum number of processes and threads."""
    file_size: int
    """Maximum bytes of one file, of the scratch folder, of /dev/shm, and of each output stream that is read."""

    @property
    def memory_of_all(self) -> int:
        """Maximum bytes of all its processes, its files and the sandbox itself together."""
        return self.memory + 2 * self.file_size + 2**25

    @property
    def interpreter(self) -> str:
        """Path of the interpreter."""
        return self.python or os.path.realpath(sys.executable)


class Bubblewrap:
    """Builder of sandbox commands. Raises BadPlugin where this machine has no such sandboxes."""

    def __init__(self, config: Confined) -> None:
        bwrap = shutil.which(config.bwrap)
        if bwrap is None:
            raise BadPlugin(
                f"{config.user} runs programs in a sandbox of bubblewrap, and there is no {config.bwrap!r} on PATH: "
                f"install bubblewrap, or set {config.bwrap_option} to its path"
            )
        self.filter = seccomp_filter()
        """The seccomp filter, which bwrap reads from a file descriptor."""
        self._config = config
        self._prlimit = shutil.which("prlimit") or "prlimit"
        self._stage: list[str] = []
        """Paths that root mounts for the sandbox."""
        self._sandbox = self._command(os.path.realpath(bwrap))
        self._probe()

    def command(self, bounds: Bounds | None, descriptors: list[str], command: list[str]) -> list[str]:
        """Return the complete command. `descriptors`: options of bwrap that name open files."""
        config = self._config
        limits = [
            f"--as={config.memory}",
            f"--cpu={config.cpu_time}",
            f"--fsize={config.file_size}",
            f"--nofile={_DESCRIPTORS}",
            "--core=0",
        ]
        # When memory runs out, the OOM killer takes the sandbox first, and not the process that started it.
        enter = f"echo 1000 > /proc/self/oom_score_adj && {bounds.enter if bounds else ':'}"
        count = [] if counted_by_the_kernel() or _linux() < _COUNTS_BY_NAMESPACE else [f"--nproc={config.processes}"]
        within = [self._prlimit, *count, "--"] if count else []
        return [*_shell(enter), self._prlimit, *limits, "--", *self._sandbox, *descriptors, "--", *within, *command]

    def works(self) -> str:
        """Run a test program; return the reason why that fails, an empty string where it succeeds."""
        read, write = os.pipe()
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(self.filter)
            result = subprocess.run(
                self.command(None, ["--seccomp", str(read)], [self._config.interpreter, "-I", "-S", "-c", _WORKS]),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[read],
                env={},
                cwd="/",
                timeout=_PROBE,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            os.close(read)
        return "" if result.stdout == b"works\n" else result.stderr.decode(errors="replace").strip()[-300:] or "no word"

    def _command(self, bwrap: str) -> list[str]:
        size = str(self._config.file_size)
        folders = _interpreter_folders(self._config)
        start = [] if os.geteuid() else self._as_nobody(bwrap, folders)
        return [
            *start,
            *(self._seen(bwrap), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
            *("--new-session", "--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)),
            *("--hostname", "sandbox", "--clearenv", "--ro-bind", "/usr", "/usr"),
            *(word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")),
            *(word for folder in folders for word in ("--ro-bind", self._seen(folder), folder)),
            *("--proc", "/proc"),
            *(word for path in _HIDDEN if os.path.exists(path) for word in ("--ro-bind", "/dev/null", path)),
            *("--remount-ro", "/proc"),
            *("--size", "4096", "--tmpfs", "/dev"),
            *(
                w
                for name in ("null", "zero", "full", "random", "urandom")
                for w in ("--dev-bind", *2 * (f"/dev/{name}",))
            ),
            *(w for n, name in enumerate(("stdin", "stdout", "stderr")) for w in _link(f"/proc/self/fd/{n}", name)),
            *_link("/proc/self/fd", "fd"),
            *("--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", size, "--tmpfs", SCRATCH),
            *("--remount-ro", "/", "--chdir", SCRATCH),
        ]

    def _as_nobody(self, bwrap: str, folders: list[str]) -> list[str]:
        self._stage += [path for path in (bwrap, *folders) if not _is_open_to_all(path)]
        setpriv = [shutil.which("setpriv") or "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        # Lets a program open its own /dev/stdout.
        pipes = f"for n in 0 1 2; do [ ! -p /proc/self/fd/$n ] || chown {NOBODY} /proc/self/fd/$n; done"
        start = [*_shell(pipes), *setpriv, "--"]
        if not self._stage:
            return start
        script = [f"mount -t tmpfs -o mode=755,size=64k cairn {_STAGE}"]
        for path in self._stage:
            place = self._seen(path)
            script.append(f"{'mkdir' if os.path.isdir(path) else ': >'} {place}")
            script.append(f"mount --bind {shlex.quote(path)} {place}")
        mounts = _shell(" && ".join(script))
        return [shutil.which("unshare") or "unshare", "--mount", "--", *mounts, *start]

    def _seen(self, path: str) -> str:
        """Return the path under which the sandbox's start sees `path`."""
        return f"{_STAGE}/{self._stage.index(path)}" if path in self._stage else path

    def _probe(self) -> None:
        why = self.works()
        if not why:
            return
        hint = (
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or use another "
            "machine"
        )
        if self._stage:
            hint = f"let every user read {self._stage[0]}, which the sandbox's user cannot, {hint}"
        raise BadPlugin(
            f"{self._config.user} runs programs only in a sandbox, and this machine cannot create one ({why}): {hint}"
        )


def _shell(script: str) -> list[str]:
    """Return a command that runs a script, and then the command behind it in the same process."""
    return ["/bin/sh", "-c", f'{script} && exec "$@"', "sh"]


def _link(target: str, name: str) -> tuple[str, str, str]:
    return "--symlink", target, f"/dev/{name}"


def _interpreter_folders(config: Confined) -> list[str]:
    """Return the folders of the interpreter outside /usr."""
    if config.python is not None:
        roots = {str(Path(config.python).resolve().parent.parent)}
    else:
        roots = {sys.base_prefix, sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"]}
        roots.add(str(Path(config.interpreter).parent.parent))
    folders = {os.path.realpath(folder) for folder in roots}
    return sorted(folder for folder in folders if folder != "/" and not Path(folder).is_relative_to("/usr"))


def _is_open_to_all(path: str) -> bool:
    """Return whether every user may read a path, by its mode and those of its parent folders."""
    wanted = stat.S_IXOTH | (stat.S_IROTH if os.path.isdir(path) else 0)
    around = all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(path).parents)
    return around and os.stat(path).st_mode & wanted == wanted


def _linux() -> tuple[int, ...]:
    return tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
