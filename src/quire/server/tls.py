"""TLS: the server's certificate, read again on SIGHUP, and connections that speak it.

A connection counts from its first byte: one that never finishes its handshake is held to the limits
and deadlines of all others. That is why the event loop listens for plain connections, and TLS
is put in between here.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from quire.core.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.logs import log
from quire.server.protocol import HttpProtocol, refusal_bytes
from quire.server.settings import ServerSettings

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
        _check(self._certificate, b"-----BEGIN CERTIFICATE-----", "a certificate", "--tls-cert")
        _check(self._key, b"PRIVATE KEY-----", "a private key", "--tls-key")
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


def _check(path: Path, mark: bytes, what: str, option: str) -> None:
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
