"""serve: the server as a process, from its first signal handler to its exit code."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import uvicorn

from quire.core.errors import ConfigError, ExecutorError, QuireError
from quire.server.app import create_app
from quire.server.logs import log
from quire.server.protocol import ConnectionLimits, protocol_class
from quire.server.service import LOADING_THREAD, Load, Service, State
from quire.server.settings import ServerSettings
from quire.server.tls import Certificate, read_certificate, with_tls

# How long a thread that reads a request may keep the interpreter from engine and event loop.
# A token passes both, so with Python's 5 ms a slow body would add 10 to 20 ms to every gap.
SWITCH_INTERVAL_S = 0.0005
_SHUTDOWN_GRACE_S = 5  # for errors to reach their clients once everything has ended

OnReady = Callable[[str], None]
Reload = Callable[[], None]  # reads a file again; raises a QuireError where it cannot be used


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: while draining, the server goes on answering."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    settings: ServerSettings, load: Load, on_ready: OnReady, on_hangup: Sequence[Reload] = ()
) -> None:
    """Serve until a signal ends it; raises what ended it otherwise.

    SIGTERM and SIGINT drain; a second one ends all requests at once. SIGHUP reads the keys and the
    certificate again and calls each of `on_hangup` on the event loop; without any of these it has
    its default effect and ends the process.
    """
    certificate = read_certificate(settings)
    if certificate is not None:
        on_hangup = [*on_hangup, certificate.reload]
    listener = _listener(settings)
    with _short_switch_interval(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, load, listener, on_ready, on_hangup, certificate))


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def exit_while_loading() -> None:
    """For atexit: end the process with 0 if a signal ended the server before its model was loaded.

    The interpreter would end the loading thread by unwinding native code that may not be unwound,
    which aborts the process. Registered before what must still be flushed, so that it runs last.
    """
    if any(thread.name == LOADING_THREAD for thread in threading.enumerate()):
        os._exit(0)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it exists: not on Windows."""
    try:
        return import_module("uvloop").new_event_loop  # type: ignore[no-any-return]
    except ImportError:
        return None


async def _serve(
    settings: ServerSettings,
    load: Load,
    listener: socket.socket,
    on_ready: OnReady,
    on_hangup: Sequence[Reload],
    certificate: Certificate | None,
) -> None:
    service = Service(settings, load)
    server = make_server(service, certificate)
    loop = asyncio.get_running_loop()
    _handle_signals(loop, service, [*service.reloads, *on_hangup])
    running = loop.create_task(server.serve(sockets=[listener]))
    ending = loop.create_task(_stop_when_ended(service, server))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)  # so that whoever reads "ready" can connect
    await service.open()
    if service.state is State.READY:
        _freeze_heap()
        address = _address(listener, settings)
        log("ready", address=address, model=service.name)
        on_ready(address)
    await running
    gc.unfreeze()  # native objects in cycles are freed at exit, or nanobind reports them as leaks
    ending.cancel()
    with suppress(asyncio.CancelledError):
        await ending
    log("stopped", state=service.state.value)
    if service.failure is not None:
        raise service.failure
    if service.state is State.STUCK:
        raise ExecutorError("the executor did not answer; the process ends for its supervisor")


def _handle_signals(
    loop: asyncio.AbstractEventLoop, service: Service, reloads: Sequence[Reload]
) -> None:
    drains: set[asyncio.Task[None]] = set()  # asyncio keeps weak references alone

    def drain(name: str) -> None:
        log("signal", signal=name, state=service.state.value)
        drains.add(loop.create_task(service.drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain, number.name)
    if reloads:
        loop.add_signal_handler(signal.SIGHUP, _reload_all, reloads)


def _reload_all(reloads: Sequence[Reload]) -> None:
    """A failed reload keeps the old state; the others are still called."""
    log("signal", signal="SIGHUP")
    for reload in reloads:
        try:
            reload()
        except QuireError as error:
            log("reload_failed", logging.ERROR, error=str(error))
        except Exception as error:
            log("reload_failed", logging.ERROR, error=f"{type(error).__name__}: {error}")


def _freeze_heap() -> None:
    """Keep the loaded model and modules out of later collections: a full one, which a request of
    many small values sets off, would stop every stream while it looks through them."""
    gc.collect()
    gc.freeze()


async def _stop_when_ended(service: Service, server: uvicorn.Server) -> None:
    """Stop listening once the service has come to its end."""
    await service.has_ended.wait()
    if service.state is State.STUCK:
        log("stuck", logging.CRITICAL)
    server.should_exit = True


def make_server(service: Service, certificate: Certificate | None = None) -> uvicorn.Server:
    """uvicorn over the application, with the limits of the settings."""
    settings = service.settings
    limits = ConnectionLimits(
        service.connections,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        unread_timeout_s=settings.unread_timeout_s,
        linger_timeout_s=settings.linger_timeout_s,
        linger_bytes=4 * settings.max_body_bytes,
        keep_alive_s=settings.keep_alive_s,
    )
    protocol: Any = protocol_class(limits)
    if certificate is not None:
        protocol = with_tls(protocol, certificate)
    config = uvicorn.Config(
        create_app(service),
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
    return _Server(config)


def _listener(settings: ServerSettings) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is known at once."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        ) from error
    return listener


def _address(listener: socket.socket, settings: ServerSettings) -> str:
    port = listener.getsockname()[1]
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
