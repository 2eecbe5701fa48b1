"""serve: the server as a process, from its first signal handler to its exit code; TLS on its
connections.

The certificate is read again on SIGHUP. A connection counts from its first byte: one that never
finishes its handshake is held to the limits and deadlines of all others. That is why the event loop
listens for plain connections, and TLS is put in between here.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import uvicorn

from quire.core.errors import ConfigError, ExecutorError, QuireError
from quire.core.heap import settle_heap
from quire.server.app import create_app
from quire.server.errors import ApiError
from quire.server.logs import log
from quire.server.middleware import App
from quire.server.model_folder import ModelFolder
from quire.server.model_service import LOADING_THREAD, Load, ModelSource, State
from quire.server.protocol import ConnectionLimits, HttpProtocol, protocol_class, refusal_bytes
from quire.server.residency import Residency
from quire.server.service import Replace, Service
from quire.server.settings import ServerSettings

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
    settings: ServerSettings,
    load: Load | Sequence[ModelSource],
    on_ready: OnReady,
    on_hangup: Sequence[Reload] = (),
    replace: Replace | None = None,
    residency: Residency | None = None,
    folder: ModelFolder | None = None,
) -> None:
    """Serve until a signal ends it; raises what ended it otherwise. `replace`: what `quire reload`
    makes of its arguments. The rest is Service's.

    SIGTERM and SIGINT drain; a second one ends all requests at once. SIGHUP reads the keys and the
    certificate again and calls each of `on_hangup` on the event loop; without any of these it has
    its default effect and ends the process.
    """
    certificate = read_certificate(settings)
    if certificate is not None:
        on_hangup = [*on_hangup, certificate.reload]
    listener = bound_listener(settings)
    make = partial(  # on the event loop
        Service, settings, load, replace=replace, residency=residency, folder=folder
    )
    run_loop(_serve(make, listener, on_ready, on_hangup, certificate))


def run_loop(work: Coroutine[None, None, None]) -> None:
    """On an event loop as servers have it."""
    with _short_switch_interval(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


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
    make: Callable[[], Service],
    listener: socket.socket,
    on_ready: OnReady,
    on_hangup: Sequence[Reload],
    certificate: "Certificate | None",
) -> None:
    service = make()
    loop = asyncio.get_running_loop()
    handle_signals(loop, lambda: service.drain(), service, [*service.reloads, *on_hangup])

    def ready() -> None:
        address = address_of(listener, service.settings)
        log("ready", address=address, model=service.name)
        on_ready(address)

    await run_service(service, listener, ready, certificate)


async def run_service(
    service: Service,
    listener: socket.socket,
    on_ready: Callable[[], None],
    certificate: "Certificate | None",
) -> None:
    """Answer requests until the service has ended; raises what ended it otherwise."""
    server = make_server(service, certificate)
    loop = asyncio.get_running_loop()
    running = loop.create_task(server.serve(sockets=[listener]))
    ending = loop.create_task(_stop_when_ended(service, server))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)  # so that whoever reads "ready" can connect
    if not service.has_opened:
        await service.open()
    if service.state is State.READY:
        settle_heap()
        on_ready()
    await running
    gc.unfreeze()  # native objects in cycles are freed at exit, or nanobind reports them as leaks
    ending.cancel()
    with suppress(asyncio.CancelledError):
        await ending
    log("stopped", state=service.state.value)
    raise_failure(service)


def raise_failure(service: Service) -> None:
    """Raise what ended a service, if it was no drain."""
    if service.failure is not None:
        raise service.failure
    if service.state is State.STUCK:
        failure = None if service.loaded is None else service.loaded.failure
        reason = "the executor did not answer" if failure is None else str(failure)
        raise ExecutorError(f"{reason}; the process ends for its supervisor")


def handle_signals(
    loop: asyncio.AbstractEventLoop,
    start_draining: Callable[[], Coroutine[None, None, None]],
    service: Service,
    reloads: Sequence[Reload],
) -> None:
    drains: set[asyncio.Task[None]] = set()  # asyncio keeps weak references alone

    def drain(name: str) -> None:
        log("signal", signal=name, state=service.state.value)
        drains.add(loop.create_task(start_draining()))

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


async def _stop_when_ended(service: Service, server: uvicorn.Server) -> None:
    """Stop listening once the service has come to its end."""
    await service.has_ended.wait()
    if service.state is State.STUCK:
        log("stuck", logging.CRITICAL)
    server.should_exit = True


def make_server(
    service: Service, certificate: "Certificate | None" = None, app: App | None = None
) -> uvicorn.Server:
    """uvicorn over the application, with the limits of the settings. `app`: one that somebody else
    serves as well, who sees to its lifespan."""
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
        app or create_app(service),
        http=protocol,
        ws="none",
        lifespan="on" if app is None else "off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
    return _Server(config)


def bound_listener(settings: ServerSettings, *, is_shared: bool = False) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is known at once. `is_shared`: other
    processes of this user may listen there too, and the system spreads connections over them."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; "
            "--host and --port take others"
        ) from error
    return listener


def address_of(listener: socket.socket, settings: ServerSettings) -> str:
    port = listener.getsockname()[1]
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# ---- TLS


PASSWORD_VARIABLE = "QUIRE_TLS_KEY_PASSWORD"
_SHUTDOWN_S = 5.0  # for the client's close_notify
_BUFFER_BYTES = 32 << 10  # of each connection; asyncio's 256 KiB add up over thousands


class Certificate:
    """The certificate that new connections get."""

    def __init__(self, certificate: Path, key: Path | None, password: str | None = None) -> None:
        self._certificate = certificate
        self._key = key or certificate
        self._password = password
        self.context = self._read()

    def reload(self) -> None:
        """Read the files again; raises, and keeps the old context, if they cannot be used."""
        self.context = self._read()
        log("reloaded", certificate=str(self._certificate))

    def _read(self) -> ssl.SSLContext:
        _check_pem(self._certificate, b"-----BEGIN CERTIFICATE-----", "a certificate", "--tls-cert")
        _check_pem(self._key, b"PRIVATE KEY-----", "a private key", "--tls-key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, self._password_for_openssl)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(self._complaint(error)) from None
        return context

    def _password_for_openssl(self) -> str:
        """Without this OpenSSL would ask on the terminal."""
        if self._password is None:
            raise ConfigError(
                f"{self._key} is encrypted: put its password into {PASSWORD_VARIABLE}, or decrypt "
                "it with `openssl pkey`"
            )
        return self._password

    def _complaint(self, error: Exception) -> str:
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            return f"the key in {self._key} is not that of the certificate in {self._certificate}"
        if self._password is not None and reason in ("BAD_DECRYPT", None):
            return f"{PASSWORD_VARIABLE} is not the password of {self._key}"
        return f"{self._certificate} and {self._key} cannot be used: {reason or error}"


def _check_pem(path: Path, mark: bytes, what: str, option: str) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from None
    if mark not in content:
        raise ConfigError(f"{option}: {path} holds no {what.partition(' ')[2]} in PEM form")


def read_certificate(settings: ServerSettings) -> Certificate | None:
    if settings.tls_cert is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key, settings.tls_key_password)


class TlsProtocol(SSLProtocol):
    """TLS between a connection and the protocol that it carries."""

    max_size = _BUFFER_BYTES

    def __init__(
        self, loop: asyncio.AbstractEventLoop, carried: HttpProtocol, context: ssl.SSLContext
    ) -> None:
        super().__init__(
            loop,
            carried,
            context,
            waiter=None,  # type: ignore[arg-type]
            server_side=True,
            ssl_handshake_timeout=carried.limits.header_timeout_s,  # type: ignore[arg-type]
            ssl_shutdown_timeout=_SHUTDOWN_S,
        )
        self._carried = carried
        self._plain: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        try:
            self._carried.enter(self._plain)
        except ApiError:
            self._plain.abort()  # no answer can be sent before the handshake
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._carried.leave()

    def _fatal_error(self, exc: BaseException, *_: object) -> None:
        """A client's mistake is not logged."""
        if isinstance(exc, ssl.SSLError) and exc.reason == "HTTP_REQUEST":
            refusal = ApiError(400, "this port speaks TLS: use https", code="http")
            self._plain.write(refusal_bytes(refusal))
            self._plain.close()
        else:
            self._plain.abort()


def with_tls(
    protocol: type[HttpProtocol], certificate: Certificate
) -> Callable[..., asyncio.BaseProtocol]:
    """What makes the protocol of each connection, as uvicorn takes it."""

    def make(
        *args: Any, _loop: asyncio.AbstractEventLoop | None = None, **kwargs: Any
    ) -> TlsProtocol:
        loop = _loop or asyncio.get_running_loop()
        return TlsProtocol(loop, protocol(*args, _loop=loop, **kwargs), certificate.context)

    return make
