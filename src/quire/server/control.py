"""The control socket of a server: how `quire reload` reaches it.

A Unix socket for the user alone, in the state folder. A command is a line of JSON; so is each line
of the answer, of which the last one says how it ended.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from quire.core.errors import ConfigError, QuireError
from quire.server.logs import log

_FOLDER = "control"
_MAX_LINE = 1 << 16
_CONNECT_S = 5.0


class Reload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve another model or another configuration; None: the same as before."""

    model: str | None = None
    config: str | None = None


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the answer: what is being done, or how it ended."""

    doing: str | None = None
    done: str | None = None
    error: str | None = None


Say = Callable[[str], None]
Handler = Callable[[Reload, Say], Awaitable[str]]


def socket_folder(state: Path) -> Path:
    return state / _FOLDER


@contextlib.asynccontextmanager
async def control_socket(state: Path, handle: Handler) -> AsyncIterator[None]:
    """Take commands while the block runs. Without a socket the server runs as well, and says so."""
    folder = socket_folder(state)
    path = folder / f"{os.getpid()}.sock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = _bound(folder, path.name)
    except OSError as error:
        log("no_control_socket", error=f"{path}: {error.strerror or error}")
        yield
        return
    answer = _Answerer(handle)
    server = await asyncio.start_unix_server(answer, sock=listener, limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        _remove(path)


def _remove(path: Path) -> None:
    """A socket that nobody answers. In a folder that can no longer be written it stays, and whoever
    looks there finds it dead."""
    with contextlib.suppress(OSError):
        path.unlink()


def _bound(folder: Path, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (folder / name).unlink(missing_ok=True)  # of a process that had our number
    try:
        with _short_name(folder) as short:
            listener.bind(f"{short}/{name}")
        (folder / name).chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short_name(folder: Path) -> Iterator[str]:
    """The name of a socket has at most 107 bytes, whatever its folder is called."""
    if sys.platform != "linux":
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class _Answerer:
    """One connection's command, and what is said of it."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def write(line: Line) -> None:
            writer.write(msgspec.json.encode(line) + b"\n")

        try:
            write(await self._answer(reader, writer, lambda text: write(Line(doing=text))))
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # whoever asked has gone
        finally:
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, say: Say
    ) -> Line:
        if not _is_ours(writer.get_extra_info("socket")):
            return Line(error="this socket is for the user who runs the server")
        try:
            asked = msgspec.json.decode(await reader.readline(), type=Reload)
            return Line(done=await self._handle(asked, say))
        except (QuireError, msgspec.MsgspecError, ValueError) as error:
            return Line(error=str(error))
        except Exception as error:
            return Line(error=f"the server failed: {error!r}")


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is the same user, or root."""
    if sys.platform != "linux":
        return True  # the folder and the socket are the user's alone
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    return user in (os.getuid(), 0)


# ---- the other end


def running_servers(state: Path) -> list[int]:
    """The processes whose control sockets answer; those of dead ones are removed."""
    found = []
    for path in sorted(socket_folder(state).glob("*.sock")):
        if not path.stem.isdecimal():
            continue
        try:
            _connected(state, int(path.stem)).close()
        except ConnectionRefusedError:
            _remove(path)
        except OSError:
            continue
        else:
            found.append(int(path.stem))
    return found


def _connected(state: Path, process: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        with _short_name(socket_folder(state)) as short:
            connection.connect(f"{short}/{process}.sock")
    except BaseException:
        connection.close()
        raise
    return connection


def send_reload(state: Path, process: int, asked: Reload, say: Say) -> str:
    """Have a server reload and wait for its end; a ConfigError says why it did not."""
    try:
        with _connected(state, process) as connection, connection.makefile("rb") as lines:
            connection.settimeout(None)  # loading takes as long as it takes
            connection.sendall(msgspec.json.encode(asked) + b"\n")
            for content in lines:
                line = msgspec.json.decode(content, type=Line)
                if line.doing is not None:
                    say(line.doing)
                elif line.done is not None:
                    return line.done
                else:
                    raise ConfigError(line.error or json.dumps(content.decode(errors="replace")))
    except OSError as error:
        raise ConfigError(
            f"no server answers at {socket_folder(state)}/{process}.sock: {error.strerror or error}"
        ) from error
    raise ConfigError(f"the server {process} ended before it had answered")
