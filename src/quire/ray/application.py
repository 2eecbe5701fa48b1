"""The Ray Serve application: an ingress that is quire's own server, and a deployment a model.

The ingress does what the server's process does: HTTP, keys, limits, templates, tokens, frames. Its
engines are the replicas of `quire.ray.replica`.
"""

import asyncio
import os
import re
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from quire.core.errors import ConfigError
from quire.llm import OnlineModel
from quire.llm.devices import Options
from quire.ray.cluster import SILENCE_S, ClusterLLM
from quire.ray.ingresses import OneIngress, SeveralIngresses, for_several
from quire.ray.replica import ModelReplica
from quire.ray.reports import HEARTBEAT_S
from quire.server import KeyRing, ServerSettings, Service, create_app, read_keys
from quire.server.middleware import App
from quire.server.model_service import ModelSource, State
from quire.server.runner import bound_listener, make_server
from quire.server.shared import ServerFigures, SharedState

ROUTINGS = ("prefix", "load", "random")  # see PrefixRouter
_HEAD = {"node:__internal_head__": 0.001}  # a resource that Ray gives the head node alone
_LOOK_S = 0.05  # whether the models are loaded
_FIGURES_EVERY_S = 1.0  # of replicas, for the autoscaler
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
    routing: str = "prefix"  # or another one of ROUTINGS
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
        if not self.silence_s >= 2 * HEARTBEAT_S:
            raise ConfigError(
                f"a replica says something every {HEARTBEAT_S:g} s: --replica-silence must be "
                f"{2 * HEARTBEAT_S:g} s or more, got {self.silence_s:g}"
            )
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing must be one of {ROUTINGS}, got {self.routing!r}")


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
    direct_port: int | None = None  # where ingresses listen themselves, beside the proxy

    def __post_init__(self) -> None:
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models are called {name!r}: name them otherwise")
        if self.num_ingresses < 1:
            raise ConfigError(f"there must be an ingress, got {self.num_ingresses}")
        if self.direct_port is not None and not 1 <= self.direct_port <= 65535:
            raise ConfigError(f"--direct-port must be from 1 to 65535, got {self.direct_port}")
        self._check_state_folder()

    def _check_state_folder(self) -> None:
        """One ingress has it, on a node that stays the same."""
        folder = self.settings.state_folder
        if folder is None:
            return
        if not folder.is_absolute():
            raise ConfigError(
                f"--state is a folder of the head node, whose path must begin with /: got {folder}"
            )
        if self.ingress_anywhere:
            raise ConfigError(
                "--state is a folder of the head node: leave it or --ingress-anywhere out"
            )
        if self.num_ingresses > 1:
            raise ConfigError(
                "--state is a folder that one ingress keeps: leave it or --ingress-replicas out"
            )

    def own_settings(self) -> ServerSettings:
        """With the keys that this process finds; refused where anybody could come in."""
        ring = read_keys(self.api_keys, os.environ)
        settings = replace(self.settings, keys=ring, no_auth=self.no_auth)
        return settings if self.num_ingresses == 1 else for_several(settings)


def without_keys(settings: ServerSettings, state_folder: Path | None) -> ServerSettings:
    """To be sent to the ingress. `state_folder` is on the head node: there is no usual one."""
    return replace(settings, keys=KeyRing(), no_auth=True, state_folder=state_folder)


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
        request_router_kwargs={"max_lead": replicas.max_lead, "routing": replicas.routing},
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
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        scaling = AutoscalingConfig(
            min_replicas=replicas.min_replicas,
            max_replicas=replicas.max_replicas,
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
            metrics_interval_s=_FIGURES_EVERY_S,  # deprecated, and what Serve 2.60 obeys
            look_back_period_s=max(2 * _FIGURES_EVERY_S, replicas.upscale_delay_s),
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
    """quire's server in a Serve replica, over the models' deployments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, *handles: DeploymentHandle
    ) -> None:
        sources = [
            ModelSource(model.names, _loader(model, handle, config.replicas.silence_s))
            for model, handle in zip(config.models, handles, strict=True)
        ]
        settings = config.own_settings()
        self._service = Service(settings, sources, _shared_state(settings, config.num_ingresses))
        self._app = create_app(self._service)
        self._opening = asyncio.create_task(self._service.open())
        await self._loaded()
        self._direct = None
        if config.direct_port is not None:
            listener = bound_listener(replace(settings, port=config.direct_port), is_shared=True)
            self._direct = DirectServer(self._service, self._app, listener)

    async def _loaded(self) -> None:
        """Serve sends requests here once the constructor has returned: not before every model has
        a replica. Raises what was wrong with one."""
        service = self._service
        while service.state is State.LOADING:
            await asyncio.sleep(_LOOK_S)
        if service.failure is not None:
            raise service.failure

    def __serve_build_asgi_app__(self) -> App:
        return self._app

    async def own_figures(self) -> ServerFigures:
        """What this ingress counts: see SeveralIngresses."""
        service = self._service
        return service.shared.figures_of(
            service.own_figures(), service.access.ring, service.num_worker_restarts
        )

    async def check_health(self) -> None:
        """Raises where a model could not be read here; Serve then starts another ingress."""
        for model in self._service.models:
            if model.state in (State.FAILED, State.STUCK):
                raise RuntimeError(f"{model.name}: {model.failure or model.state}")

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            if self._direct is not None:
                self._direct.close()
            await self._service.drain()


class DirectServer:
    """The ingress's own port, which other ingresses of its node share: what is streamed there does
    not pass Serve's proxy, to which every piece of a stream is a message of Ray."""

    def __init__(self, service: Service, app: App, listener: socket.socket) -> None:
        self._server = make_server(service, app=app)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))

    def close(self) -> None:
        """Take no more connections: those that come go to another ingress of this port."""
        for listening in getattr(self._server, "servers", ()):  # none before it has started
            listening.close()


def _shared_state(settings: ServerSettings, num_ingresses: int) -> SharedState:
    """That of this ingress."""
    context = serve.get_replica_context()
    if num_ingresses == 1:
        cluster = ray.get_runtime_context().gcs_address
        return OneIngress.over(settings, f"application {context.app_name} at {cluster}")
    all_of_them = serve.get_deployment_handle(context.deployment, context.app_name)
    return SeveralIngresses.over(settings, all_of_them)


def _loader(
    model: ModelConfig, handle: DeploymentHandle, silence_s: float
) -> Callable[[Callable[[], None]], OnlineModel]:
    def load(_on_stuck: Callable[[], None]) -> OnlineModel:
        return ClusterLLM.load(model.model, model.options, handle, silence_s)

    return load
