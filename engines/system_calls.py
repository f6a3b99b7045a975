"""A seccomp filter for programs that are not trusted: what of the kernel no namespace separates, they may not ask for.

| refused | since |
|---|---|
| keys | a program has the session keyring of whoever starts it |
| sockets but of UNIX, IPv4, IPv6 and netlink | `AF_VSOCK` reaches a virtual machine's host from any namespace |
| io_uring | its operations pass no filter |
| memory that no process holds (`memfd_create`, System V) | it would be bounded by nothing where there is no cgroup |
| tracing, bpf, perf events, userfaultfd | a program needs none, and holes of the kernel were found there |
| calls of another instruction set | their numbers mean something else; the process is killed |
"""

import platform
import struct
from functools import cache

from cairn.configs.plugins import BadPlugin

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
    """The filter as `bwrap --seccomp` takes it. Raises BadPlugin for a machine whose calls it does not know."""
    machine = platform.machine()
    if machine not in _REFUSED:
        raise BadPlugin(
            f"programs run in a sandbox alone, which knows no system calls of {machine}: use x86_64 or aarch64"
        )
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
