"""Takes privileges from the process it runs in, for good: what the system has of these.

- limits on processor time, memory, files written, descriptors and processes (setrlimit)
- another user, where this one is root, and no capabilities
- Landlock: no file can be opened, made or run, no TCP port reached, no other process signalled
- seccomp: no system call but the few that computing on open files takes

Landlock has three system calls and seccomp takes a program of some fifty instructions, so both are
called directly. The packages that wrap them were looked at: pyseccomp has had no release since 2021
and wants libseccomp installed; landlock is a pre-release, py-landlock and landlockpy are new.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress

_NOBODY = 65534

# prctl(2)
_SET_PARENT_DEATH_SIGNAL = 1
_SET_SECCOMP = 22
_SET_NO_NEW_PRIVILEGES = 38
_SECCOMP_FILTER = 2

# landlock(7); its system calls have the same numbers on every architecture
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_GIVE_VERSION = 1
_FILE_ACCESS = {1: 13, 2: 14, 3: 15, 5: 16}  # from this version on: how many kinds there are
_TCP_SINCE, _TCP_ACCESS = 4, 0b11  # binding and connecting
_SCOPES_SINCE, _SCOPES = 6, 0b11  # abstract sockets and signals of processes outside

# seccomp(2)
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | 1  # the call fails with EPERM
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {  # by name: the number on x86_64 and on aarch64
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "setitimer": (38, 103),  # for a process with a CPU budget for each request
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),  # as which newer C libraries ask for fstat
    "set_robust_list": (273, 99),
    "preadv": (295, 69),
    "getrandom": (318, 278),
    "preadv2": (327, 286),
    "rseq": (334, 293),
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of the filter
_CALL_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # offsets in what the filter looks at


def lock_down(cpu_s: int | None, memory: int, *, dies_with_parent: bool = True) -> list[str]:
    """Give up all privileges that the system lets us give up; the measures in force, as text.

    `cpu_s` (None: no limit) and `memory` (bytes of addresses) are the process's from its start.
    Call it while there is one thread: others would keep what they have. To die with its parent is
    to die with the thread that started it, which is not for a process that outlives that thread.
    """
    if sys.platform != "linux":
        _set_limits(cpu_s, memory)
        return ["resource limits"]
    libc = ctypes.CDLL(None, use_errno=True)
    in_force = []
    if _becomes_nobody():
        in_force.append("no root")
    if dies_with_parent:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if _drops_capabilities(libc):
        in_force.append("no capabilities")
    libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if version := _restrict_by_landlock(libc):  # before the limits: it opens a descriptor
        in_force.append(f"Landlock {version}")
    _set_limits(cpu_s, memory)
    in_force.append("resource limits")
    if _filter_calls(libc):
        in_force.append("seccomp")
    return in_force


def _set_limits(cpu_s: int | None, memory: int) -> None:
    values = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_NOFILE: (0, 0),  # those that are open stay open
        resource.RLIMIT_AS: (memory, memory),
    }
    if cpu_s is not None:
        values[resource.RLIMIT_CPU] = (cpu_s, cpu_s + 5)  # SIGXCPU tells it from other ends
    for kind, wanted in values.items():
        hard = resource.getrlimit(kind)[1]
        largest = max(wanted) if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(kind, (min(wanted[0], largest), min(wanted[1], largest)))


def _becomes_nobody() -> bool:
    """Stop being root; False where it is not, or where the system knows no other user."""
    if os.geteuid() != 0:
        return False
    with suppress(OSError):
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        return True
    return False


def _drops_capabilities(libc: ctypes.CDLL) -> bool:
    header = struct.pack("<Ii", 0x20080522, 0)  # the interface's version, and this process
    return bool(libc.capset(header, bytes(24)) == 0)


def _restrict_by_landlock(libc: ctypes.CDLL) -> int:
    """Allow no file, no port; the version of Landlock, or 0 where there is none."""
    version: int = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_GIVE_VERSION)
    if version < 1:
        return 0
    num_kinds = max(count for since, count in _FILE_ACCESS.items() if since <= version)
    handled = [(1 << num_kinds) - 1]
    if version >= _TCP_SINCE:
        handled.append(_TCP_ACCESS)
    if version >= _SCOPES_SINCE:
        handled.append(_SCOPES)
    rules = struct.pack(f"<{len(handled)}Q", *handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        return 0
    is_restricted = libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return version if is_restricted else 0


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Allow the calls of the table; False where the system or this architecture has no filters."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return False
    column = list(_ARCHITECTURES).index(machine)
    allowed = [numbers[column] for numbers in _CALLS.values()]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, len(allowed) + 1, _ARCHITECTURES[machine]),
        (_LOAD, 0, 0, _CALL_NUMBER_AT),
        *((_JUMP_IF_EQUAL, len(allowed) - at, 0, call) for at, call in enumerate(allowed)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    return bool(libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0) == 0)
