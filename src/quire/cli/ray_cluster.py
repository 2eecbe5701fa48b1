"""A Ray cluster for `quire ray serve`: joined or started, and the application on it until a signal
ends it."""

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray._private.services import find_bootstrap_address
from ray.serve.schema import ApplicationStatus

from quire.core.errors import ConfigError, ExecutorError
from quire.llm.assembly import read_text
from quire.ray.application import ClusterConfig, build

# What replicas, ingress and proxy log is in files under Ray's folder.
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
_CONNECT_S = 5.0
_LOOK_EVERY_S = 2.0  # at the application's state
_MORE_TIME_S = 15.0  # for Serve to end replicas, behind the time that running requests have


# ---- the cluster


@contextmanager
def joined_cluster(
    address: str | None, config: ClusterConfig, host: str, ports: Sequence[int]
) -> Iterator[None]:
    """One that runs (`address`, RAY_ADDRESS, or on this machine), else or with the address local a
    new one, which ends with this program. What cannot work on a new one is refused before it is
    started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # quire reports to nobody
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    is_new = address == "local" or not _join(address)
    try:
        if is_new:
            _check_models_here(config)
            for port in ports:
                _check_port(host, port)
            ray.init(address="local", include_dashboard=False, **_QUIET)
        _check_resources(config, is_new=is_new)
        yield
    finally:
        ray.shutdown()


def _join(address: str | None) -> bool:
    """Whether there is a cluster; one that was named must be there."""
    named = address or os.environ.get("RAY_ADDRESS")
    found = named
    if named is None or named == "auto":
        found = find_bootstrap_address(None)  # what the last `ray start` of this machine wrote down
    reason = "none was started here" if found is None else _why_unreachable(found)
    if reason is None:
        try:
            ray.init(address=found, **_QUIET)
            return True
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = _line(error)
    if named is None:
        return False
    raise ConfigError(
        f"there is no Ray cluster at {named}: {reason}; `ray start --head` says the address of the "
        "one that it starts"
    )


def _why_unreachable(address: str) -> str | None:
    """None where somebody listens. Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return None  # Ray may know it by another scheme
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _check_models_here(config: ClusterConfig) -> None:
    """All nodes of a new cluster are this machine: what is wrong with a model is said at once."""
    for model in config.models:
        read_text(model.model, model.options)


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host}:{port}: {error.strerror}; --port and --direct-port take "
                "others"
            ) from error


def _check_resources(config: ClusterConfig, *, is_new: bool) -> None:
    """Whether the fewest replicas fit. A cluster that was there may grow: there it is a warning."""
    there = ray.cluster_resources()
    replicas = config.replicas
    count = max(1, replicas.min_replicas) * len(config.models)
    for name, each in (("CPU", replicas.num_cpus), ("GPU", replicas.num_gpus)):
        if count * each <= there.get(name, 0.0):
            continue
        message = (
            f"{count} replicas of {each:g} {name}s need {count * each:g}, and the cluster has "
            f"{there.get(name, 0.0):g}"
        )
        if is_new:
            raise ConfigError(f"{message}: give --replicas or --{name.lower()}s a smaller number")
        print(f"quire: {message}: replicas wait until there are more", file=sys.stderr)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---- the application


class StoppedError(BaseException):
    """A signal asked for the end."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise StoppedError


class Running:
    """quire's application on the cluster that this program has joined."""

    def __init__(self, name: str, config: ClusterConfig, http_options: dict[str, Any]) -> None:
        self._name = name
        self._config = config
        self._http_options = http_options

    def deploy(self) -> None:
        """Returns when requests are answered; a signal meanwhile takes everything back."""
        serve.start(proxy_location="HeadOnly", http_options=self._http_options)
        self._check_proxy()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        try:
            serve.run(build(self._config), name=self._name, route_prefix="/")
        except StoppedError:
            self._end(0.0)
            raise KeyboardInterrupt from None
        except (RuntimeError, ValueError) as error:
            cause = self._failure() or _line(error)
            self._end(0.0)
            raise ExecutorError(f"the application could not be started: {cause}") from error

    def wait(self) -> None:
        """Until a signal comes, then drain; a second signal ends at once."""
        try:
            while True:
                time.sleep(_LOOK_EVERY_S)
                self._check_state()
        except StoppedError:
            drain_s = self._config.settings.drain_timeout_s
            print(f"quire drains: running requests have {drain_s:g} s", flush=True)
        try:
            self._end(drain_s + _MORE_TIME_S)
        except StoppedError:
            raise KeyboardInterrupt from None

    def _check_proxy(self) -> None:
        """Serve keeps the proxy that a cluster has, wherever that listens."""
        found = serve.context._get_global_client().http_config
        wanted = self._http_options
        if (found.host, found.port) != (wanted["host"], wanted["port"]):
            raise ConfigError(
                f"Serve listens at {found.host}:{found.port} on this cluster: give --host and "
                "--port the same, or end it with `serve shutdown`"
            )

    def _check_state(self) -> None:
        try:
            state = serve.status().applications.get(self._name)
        except Exception as error:
            raise ExecutorError(f"the cluster does not answer any more: {_line(error)}") from error
        if state is None or state.status is ApplicationStatus.DELETING:
            raise ExecutorError(f"the application {self._name!r} was deleted by somebody else")

    def _failure(self) -> str | None:
        """The error of a replica that did not start, without its traceback."""
        try:
            state = serve.status().applications.get(self._name)
        except Exception:
            return None
        if state is None:
            return None
        messages = [one.message for one in state.deployments.values()] + [state.message]
        return next((found for text in messages if (found := cause_in(text))), None)

    def _end(self, timeout_s: float) -> None:
        """Delete the application, and wait for what it does."""
        try:
            serve.delete(self._name, _blocking=False)
            deadline = time.monotonic() + timeout_s
            while self._name in serve.status().applications and time.monotonic() < deadline:
                time.sleep(0.1)
        except (RuntimeError, ValueError) as error:
            print(f"quire: the application could not be ended: {_line(error)}", file=sys.stderr)


def cause_in(message: str) -> str | None:
    """The last error of quire's own in a text with tracebacks, as one line."""
    found = re.findall(r"quire\.core\.errors\.\w+: (.*?)(?=\n\S*Error|\n\n|\n?\Z)", message, re.S)
    return " ".join(found[-1].split()) if found else None
