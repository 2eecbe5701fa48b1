"""A socket and bytes: for clients that no HTTP library would be."""

import socket
import time

from tests.server.servers import PATIENCE_S


def exchange(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts with pauses between them, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break  # it has closed already: what it said is still to be read
            time.sleep(pause_s)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()
