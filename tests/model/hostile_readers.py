"""Readers that do what a file might make a reader do, for the process without privileges to run.

The tests name them as the entry of that process, in the place of quire's own reader.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.reading import Files


def loop_for_ever(path: Path, files: Files) -> None:
    while True:
        pass


def sleep_for_ever(path: Path, files: Files) -> None:
    while True:
        time.sleep(1000)


def take_all_memory(path: Path, files: Files) -> None:
    held = []
    while True:
        held.append(bytearray(1 << 24))


def crash(path: Path, files: Files) -> None:
    ctypes.string_at(0)


def abort(path: Path, files: Files) -> None:
    os.abort()


def fail(path: Path, files: Files) -> None:
    raise IndexError("list index out of range")


def refuse(path: Path, files: Files) -> None:
    raise UnsupportedModelError("cannot\x1b[2Jrun it")


def talk_without_end(path: Path, files: Files) -> None:
    while True:
        os.write(1, b"[" * 4096)


def lie(path: Path, files: Files) -> None:
    os.write(1, b"5\n")


def tell_what_is_possible(path: Path, files: Files) -> None:
    """The outcome of each attempt, as the message of an error: the error's name, or "done"."""
    attempts: dict[str, Callable[[], object]] = {
        "read a file": lambda: os.open("/etc/hostname", os.O_RDONLY),
        "read this program": lambda: os.open(__file__, os.O_RDONLY),
        "read the model's file again": lambda: os.open(path, os.O_RDONLY),
        "list a folder": lambda: os.listdir("/"),
        "make a file": lambda: os.open("/tmp/quire-made-by-a-hostile-file", os.O_CREAT | os.O_RDWR),
        "remove the file": lambda: os.unlink(path),
        "read another process's memory": lambda: os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR),
        "make a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "make a local socket": lambda: socket.socket(socket.AF_UNIX),
        "fork": os.fork,
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        "signal its parent": lambda: os.kill(os.getppid(), signal.SIGCONT),
        "be root": lambda: os.setuid(0),
        "have more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
    }
    outcomes = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            outcomes[name] = "done"
        except BaseException as error:
            outcomes[name] = type(error).__name__
    outcomes["read what is open"] = str(files.open(path).read(0, 4).tobytes())
    raise ModelFileError(json.dumps(outcomes))


def tell_limits(path: Path, files: Files) -> None:
    """As the system sees them: asking is among what a process without privileges may not do."""
    raise ModelFileError(json.dumps(_LIMITS_FILE.read().splitlines()))


_LIMITS_FILE = open("/proc/self/limits")  # noqa: SIM115 - as long as files can be opened
