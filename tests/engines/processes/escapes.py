"""What a program in a sandbox tries, each a function that raises or returns False where it is held. It is given what it
has to know as JSON by stdin, and prints what got through: the standard library of any Python runs it."""

import ctypes
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import sys
import time

INPUTS = json.loads(sys.stdin.read() or "{}")
libc = ctypes.CDLL(None, use_errno=True)
TRIES = {}
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
PTRACE_ATTACH = 16
KEYCTL, REQUEST_KEY, ADD_KEY = (250, 249, 248) if platform.machine() == "x86_64" else (219, 218, 217)
SHMGET, IO_URING_SETUP = (29, 425) if platform.machine() == "x86_64" else (194, 425)
DEVICES = {"fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"}


def tries(function):
    TRIES[function.__name__] = function
    return function


def opens(path, flags=os.O_WRONLY):
    """Whether a file opens; nothing is written."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:
        return False
    return True


def below(folder):
    for root, folders, files in os.walk(folder):
        if root == "/proc":
            folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self")]
        yield from (os.path.join(root, name) for name in files)


def status(name):
    with open("/proc/self/status") as lines:
        return next(line.split()[1] for line in lines if line.startswith(name + ":"))


@tries
def write_any_kernel_setting():
    return [path for path in below("/proc/sys") if opens(path)]


@tries
def write_anything_in_proc():
    return [path for path in below("/proc") if opens(path)]


@tries
def see_sys():
    return [path for path in ("/sys/kernel", "/sys/class", "/sys/fs/cgroup", "/sys/firmware") if os.path.exists(path)]


@tries
def see_its_cgroup():
    return [line for line in open("/proc/self/cgroup") if not line.rstrip().endswith(":/")]


@tries
def see_devices_of_the_machine():
    return sorted(set(os.listdir("/dev")) - DEVICES)


@tries
def make_a_device():
    os.mknod("/scratch/device", stat.S_IFCHR | 0o600, os.makedev(1, 1))
    return True


@tries
def write_outside_of_its_folders():
    return [path for path in ("/x", "/dev/x", "/proc/x", "/usr/x", "/usr/lib/x", os.path.dirname(os.__file__) + "/x")
            if opens(path, os.O_WRONLY | os.O_CREAT)]  # fmt: skip


@tries
def see_files_of_the_machine():
    return [path for path in ("/etc/passwd", "/root", "/home", "/tmp", "/var", "/run", *INPUTS["files"])
            if os.path.exists(path)]  # fmt: skip


@tries
def see_the_environment():
    return sorted(set(os.environ) - {"PWD", "LC_CTYPE"})


@tries
def see_other_processes():
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 64]


@tries
def signal_other_processes():
    os.kill(INPUTS["pid"], 0)
    return True


@tries
def trace_other_processes():
    return [pid for pid in (1, os.getppid(), INPUTS["pid"]) if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) == 0]


@tries
def write_into_other_processes():
    return [pid for pid in (1, INPUTS["pid"]) if opens(f"/proc/{pid}/mem", os.O_RDWR) and pid != os.getpid()]


@tries
def read_keys():
    result = [libc.syscall(KEYCTL, 0, ring, 0) for ring in (-3, -4, -5)]
    result.append(libc.syscall(REQUEST_KEY, b"user", INPUTS["key"].encode(), None, 0))
    return [one for one in result if one != -1] + ["/proc/keys"] * (INPUTS["key"] in open("/proc/keys").read())


@tries
def write_keys():
    return libc.syscall(ADD_KEY, b"user", b"of-a-program", b"x", 1, -3) != -1


@tries
def reach_a_port():
    return socket.create_connection(("127.0.0.1", INPUTS["port"]), 1) is not None


@tries
def reach_the_world():
    return socket.create_connection(("1.1.1.1", 53), 1) is not None


@tries
def reach_an_abstract_socket():
    socket.socket(socket.AF_UNIX).connect("\0" + INPUTS["abstract"])
    return True


@tries
def make_sockets_of_other_kinds():
    result = []
    for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG, socket.AF_CAN, 15, 16 + 64):
        try:
            socket.socket(family, socket.SOCK_DGRAM if family != socket.AF_ALG else socket.SOCK_SEQPACKET).close()
        except OSError:
            continue
        result.append(family)
    return result


@tries
def go_round_the_filter():
    """Calls of another instruction set, or by a queue."""
    if libc.syscall(IO_URING_SETUP, 1, bytes(120)) != -1:
        return "io_uring"
    if platform.machine() != "x86_64":
        return False
    if libc.syscall(0x40000000 + 39) != -1:  # getpid of x32
        return "x32"
    if (child := os.fork()) == 0:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # getpid of i386
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


@tries
def make_namespaces():
    return [flag for flag in (NEW_USER, NEW_MOUNTS, NEW_USER | NEW_MOUNTS) if libc.unshare(flag) == 0]


@tries
def enter_namespaces():
    return [name for name in os.listdir("/proc/1/ns") if libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0]


@tries
def mount():
    kinds = (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"devtmpfs")
    result = [kind for kind in kinds if libc.mount(b"x", b"/scratch", kind, 0, None) == 0]
    return result or libc.mount(None, b"/", None, 32 | 4096, None) == 0 or libc.umount2(b"/proc/sys", 2) == 0


@tries
def gain_rights():
    result = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status(name), 16)]
    result += [name for name, wanted in (("NoNewPrivs", "1"), ("Seccomp", "2")) if status(name) != wanted]
    for function in (os.setuid, os.setgid, os.seteuid, os.setegid):
        try:
            function(0)
        except OSError:
            continue
        result.append(function.__name__)
    return result


@tries
def change_the_machine():
    def rename():
        socket.sethostname("other")

    def set_the_clock():
        time.clock_settime(time.CLOCK_REALTIME, time.time())

    def be_first():
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    def be_spared():
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-1000")

    def have_more():
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    result = []
    for function in (
        rename,
        set_the_clock,
        be_first,
        be_spared,
        have_more,
        lambda: os.nice(-1),
        lambda: os.chroot("/"),
    ):
        try:
            function()
        except (OSError, ValueError):
            continue
        result.append(function.__name__)
    return result


@tries
def keep_memory_in_the_kernel():
    result = ["memfd"] if libc.memfd_create(b"x", 0) != -1 else []
    return result + (["shm"] if libc.syscall(SHMGET, 0, 2**20, 0o1600) != -1 else [])


@tries
def fill_disks():
    written = 0
    for folder in ("/scratch", "/dev/shm", "/dev", "/"):
        for number in range(64):
            try:
                with open(f"{folder}/{number}", "wb", 0) as file:
                    while count := file.write(bytes(2**16)):
                        written += count
            except OSError:
                pass
    for folder in ("/scratch", "/dev/shm"):
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
    return written if written > 2 * INPUTS["file_size"] or not written else False


@tries
def take_all_descriptors():
    held = []
    try:
        while len(held) < 10_000:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for one in held:
        os.close(one)
    return len(held) > 1024


@tries
def fork_without_end():
    children = []
    try:
        for _ in range(500):
            if (child := os.fork()) == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    except OSError:
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children) > INPUTS["processes"]


@tries
def end_what_holds_it():
    os.kill(1, signal.SIGKILL)
    time.sleep(0.05)
    return False  # it is still here to say so


def outcome(function):
    try:
        return function() or None
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    print(json.dumps({name: result for name, function in TRIES.items() if (result := outcome(function)) is not None}))
    print(len(TRIES), "tries")
