"""The Ray Serve application: an ingress that is quire's own server, and a deployment a model.

The ingress does what the server's process does: HTTP, keys, limits, templates, tokens, frames. Its
engines are the replicas of `quire.ray.replica`.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from quire.core.errors import ConfigError
from quire.llm import OnlineModel
from quire.llm.devices import Options
from quire.ray.cluster import SILENCE_S, ClusterLLM
from quire.ray.replica import ModelReplica
from quire.server import KeyRing, ServerSettings, Service, create_app, read_keys
from quire.server.middleware import App, Message, Receive, Scope, Send
from quire.server.service import State

_HEAD = {"node:__internal_head__": 0.001}  # a resource that Ray gives the head node alone
_INGRESS_REQUESTS = 4096  # that one ingress answers at once, as ServerSettings.max_connections


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model that is served: `model` is a path or name that every node knows."""

    model: str
    names: tuple[str, ...]
    options: Options

    @property
    def deployment(self) -> str:
        return "model-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", self.names[0])


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What a replica gets, and how many there are: `min_replicas` to `max_replicas`."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 1
    target_load: float = 0.8
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    max_lead: int = 8  # requests that a replica may have more than another, for its prefixes
    routing: str = "prefix"  # or "load"
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ConfigError(
                f"replicas must be from 0 to at least 1, got {self.min_replicas} to "
                f"{self.max_replicas}"
            )
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ConfigError("a replica's CPUs and GPUs must be 0 or more")
        if not 0 < self.target_load <= 1:
            raise ConfigError(f"target_load must be above 0 and at most 1, got {self.target_load}")
        if self.routing not in ("prefix", "load"):
            raise ConfigError(f"routing must be prefix or load, got {self.routing!r}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole application. Keys are no part of it: the ingress reads `api_keys` or QUIRE_API_KEY
    on its own node, so that no secret is kept in the cluster's store."""

    models: tuple[ModelConfig, ...]
    replicas: ReplicaConfig
    settings: ServerSettings = field(default_factory=ServerSettings)
    api_keys: Path | None = None
    no_auth: bool = False
    num_ingresses: int = 1
    ingress_cpus: float = 0.0
    ingress_anywhere: bool = False  # else on the head node, where the proxy is

    def __post_init__(self) -> None:
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models are called {name!r}: name them otherwise")

    def own_settings(self) -> ServerSettings:
        """With the keys that this process finds; refused where anybody could come in."""
        ring = read_keys(self.api_keys, os.environ)
        return replace(self.settings, keys=ring, no_auth=self.no_auth)


def without_keys(settings: ServerSettings) -> ServerSettings:
    """To be sent to the ingress."""
    return replace(settings, keys=KeyRing(), no_auth=True, state_folder=None)


def build(config: ClusterConfig) -> serve.Application:
    """The application, to be run or deployed."""
    handles = [_model_deployment(model, config).bind(model.model, model.options)
               for model in config.models]  # fmt: skip
    return _ingress_deployment(config).bind(config, *handles)


def _model_deployment(model: ModelConfig, config: ClusterConfig) -> serve.Deployment:
    replicas, engine = config.replicas, model.options.engine_config()
    most = engine.max_batch_size + engine.max_queue_requests
    router = RequestRouterConfig(
        request_router_class="quire.ray.routing.PrefixRouter",
        request_router_kwargs={
            "max_lead": replicas.max_lead,
            "uses_prefixes": replicas.routing == "prefix",
        },
    )
    deployment: serve.Deployment = serve.deployment(ModelReplica).options(
        name=model.deployment,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        max_ongoing_requests=most,  # the engine has the queue: fairness and 429s are its own
        max_queued_requests=engine.max_queue_requests,
        request_router_config=router,
        graceful_shutdown_timeout_s=config.settings.drain_timeout_s,
        health_check_period_s=2.0,
        health_check_timeout_s=20.0,
        **_scaling(model, replicas),
    )
    return deployment


def _scaling(model: ModelConfig, replicas: ReplicaConfig) -> dict[str, Any]:
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.max_replicas}
    policy = AutoscalingPolicy(
        policy_function="quire.ray.scaling.ScalingPolicy",
        policy_kwargs={
            "max_batch_size": model.options.max_batch_size,
            "target_load": replicas.target_load,
        },
    )
    scaling = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=replicas.max_replicas,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _ingress_deployment(config: ClusterConfig) -> serve.Deployment:
    where = {} if config.ingress_anywhere else {"resources": _HEAD}
    deployment: serve.Deployment = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=config.num_ingresses,
        ray_actor_options={"num_cpus": config.ingress_cpus, **where},
        max_ongoing_requests=_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=config.settings.drain_timeout_s,
        health_check_period_s=2.0,
    )
    return deployment


# ---- on the ingress's node


class Ingress:
    """quire's server in a Serve replica: an app a model, over the models' deployments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, *handles: DeploymentHandle
    ) -> None:
        settings = config.own_settings()
        self._services: dict[str, Service] = {}
        for model, handle in zip(config.models, handles, strict=True):
            own = replace(settings, model_names=model.names)
            load = _loader(model, handle, config.replicas.silence_s)
            first = next(iter(self._services.values()), None)
            service = Service(own, load, None if first is None else first.shared)
            if first is not None:  # keys, their limits and quotas are those of all models together
                service.access = first.access
            self._services[model.names[0]] = service
        self._opening = [asyncio.create_task(one.open()) for one in self._services.values()]

    def __serve_build_asgi_app__(self) -> App:
        apps: dict[Sequence[str], App] = {
            one.settings.model_names: create_app(one) for one in self._services.values()
        }
        return next(iter(apps.values())) if len(apps) == 1 else ModelSwitch(apps)

    async def check_health(self) -> None:
        """Raises where a model could not be read here; Serve then starts another ingress."""
        for name, service in self._services.items():
            if service.state in (State.FAILED, State.STUCK):
                raise RuntimeError(f"{name}: {service.failure or service.state}")

    async def __del__(self) -> None:
        for service in getattr(self, "_services", {}).values():
            await service.drain()


def _loader(
    model: ModelConfig, handle: DeploymentHandle, silence_s: float
) -> Callable[[Callable[[], None]], OnlineModel]:
    def load(_on_stuck: Callable[[], None]) -> OnlineModel:
        return ClusterLLM.load(model.model, model.options, handle, silence_s)

    return load


class ModelSwitch:
    """An ASGI application over one for each model: a body's `model` chooses, or the path under
    /v1/models; a request that names none gets the first."""

    def __init__(self, apps: Mapping[Sequence[str], App]) -> None:
        self._by_name = {name: app for names, app in apps.items() for name in names}
        self._apps = list(apps.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _all_lifespans(self._apps, receive, send)
        elif scope["path"] == "/v1/models" and scope["method"] == "GET":
            await self._list_models(scope, receive, send)
        elif scope["path"].startswith("/v1/models/"):
            name = scope["path"].removeprefix("/v1/models/")
            await self._app_of(name)(scope, receive, send)
        elif scope["method"] == "POST":
            body, rest = await _read_body(receive)
            await self._app_of(_model_of(body))(scope, _replayed(body, rest, receive), send)
        else:
            await self._apps[0](scope, receive, send)

    def _app_of(self, name: str | None) -> App:
        """Of an unknown model the first one's, which says so."""
        return self._by_name.get(name or "", self._apps[0])

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The lists of all; where one refuses, its answer."""
        answers = []
        for app in self._apps:
            answer = _Answer()
            await app(dict(scope), receive, answer.send)
            if answer.status != 200:
                break
            answers.append(json.loads(answer.body))
        else:
            cards = [card for found in answers for card in found["data"]]
            answer.body = json.dumps({**answers[0], "data": cards}).encode()
        await answer.forward(send)


class _Answer:
    """An answer that is read instead of sent."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self._headers: list[tuple[bytes, bytes]] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], list(message["headers"])
        else:
            self.body += message.get("body", b"")

    async def forward(self, send: Send) -> None:
        headers = [pair for pair in self._headers if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


_MAX_READ_BYTES = 64 << 20  # ahead of the application, whose own limit then refuses more


async def _read_body(receive: Receive) -> tuple[bytes, Message | None]:
    """A body, and the message that ended it early if one did: the client has gone, or it is too
    large to be looked at."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False) or size > _MAX_READ_BYTES:
            return b"".join(parts), None


def _replayed(body: bytes, rest: Message | None, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    if rest is not None:
        waiting = [rest]

    async def replay() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return replay


def _model_of(body: bytes) -> str | None:
    try:
        found = json.loads(body)
    except ValueError:  # the application refuses it
        return None
    name = found.get("model") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


async def _all_lifespans(apps: Sequence[App], receive: Receive, send: Send) -> None:
    """Start every application, and end them in turn."""
    await receive()
    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(_lifespan(app))
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})


@asynccontextmanager
async def _lifespan(app: App) -> Any:
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()
    running = asyncio.ensure_future(app({"type": "lifespan"}, to_app.get, from_app.put))
    for phase in ("startup", "shutdown"):
        to_app.put_nowait({"type": f"lifespan.{phase}"})
        if (await from_app.get())["type"] != f"lifespan.{phase}.complete":
            raise RuntimeError(f"the server's {phase} failed")
        if phase == "startup":
            yield
    await running
