"""`quire ray serve`: models on a Ray cluster. Its options are in `quire.cli.ray_options`.

The application is made from a command line in one place, `application`, which a Serve configuration
(`serve deploy`, KubeRay) names as its import path.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from quire.cli.ray_cluster import Running, joined_cluster
from quire.cli.ray_options import parse
from quire.cli.serve import named_model, options_of, settings_of
from quire.core.errors import ConfigError
from quire.llm.devices import Options
from quire.ray.application import ClusterConfig, ModelConfig, ReplicaConfig, build, without_keys

IMPORT_PATH = "quire.cli.ray:application"


def serve_models(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Until SIGINT or SIGTERM."""
    config = cluster_config(parsed)
    if parsed.dry_run:
        given = [word for word in arguments if word != "--dry-run"]
        print(json.dumps(serve_configuration(parsed, given), indent=2))
        return 0
    config.own_settings()  # what is wrong with the keys is said before anything starts
    ports = [port for port in (parsed.port, parsed.direct_port) if port is not None]
    with joined_cluster(parsed.address, config, parsed.host, ports):
        running = Running(parsed.name, config, _http_options(parsed))
        running.deploy()
        addresses = " and ".join(f"http://{parsed.host}:{port}/v1" for port in ports)
        print(f"quire serves {', '.join(_names(config))} at {addresses}", flush=True)
        running.wait()
    return 0


def application(args: dict[str, str]) -> serve.Application:
    """For Serve: `args: {command: "MODEL --gpus 1 ..."}`, as after `quire ray serve`."""
    unknown = [name for name in args if name != "command"]
    if unknown or "command" not in args:
        raise ConfigError(f"args must be {{command: 'MODEL [options]'}}, got {args!r:.200}")
    return build(cluster_config(parse(shlex.split(args["command"]))))


def serve_configuration(args: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    """What `serve deploy` and KubeRay's serveConfigV2 take; YAML, because JSON is."""
    made = {"name": args.name, "route_prefix": "/", "import_path": IMPORT_PATH}
    return {
        "proxy_location": "HeadOnly",
        "http_options": _http_options(args),
        "applications": [{**made, "args": {"command": shlex.join(given)}}],
    }


def _http_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"host": args.host, "port": args.port}


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    if args.direct_port == args.port:
        raise ConfigError(f"--port {args.port} is Serve's: give --direct-port another one")
    settings = settings_of(args)
    options = _replica_options(options_of(args, settings), args)
    first = ModelConfig(args.model, settings.model_names, options)
    others = [_other(given, options) for given in (*args.more_models, *args.also)]
    fixed = 1 if args.replicas is None else args.replicas
    least = fixed if args.min_replicas is None else args.min_replicas
    most = max(fixed, least) if args.max_replicas is None else args.max_replicas
    return ClusterConfig(
        models=(first, *others),
        replicas=ReplicaConfig(
            num_cpus=args.cpus,
            num_gpus=args.gpus,
            min_replicas=least,
            max_replicas=most,
            target_load=args.target_load,
            upscale_delay_s=args.upscale_delay,
            downscale_delay_s=args.downscale_delay,
            max_lead=args.max_lead,
            routing=args.routing,
            silence_s=args.replica_silence,
        ),
        settings=without_keys(settings, args.state),
        api_keys=args.api_keys,
        no_auth=args.no_auth,
        num_ingresses=args.ingress_replicas,
        ingress_cpus=args.ingress_cpus,
        ingress_anywhere=args.ingress_anywhere,
        direct_port=args.direct_port,
    )


def _replica_options(options: Options, args: argparse.Namespace) -> Options:
    """With the device that a replica's resources mean, and as many threads as it has CPUs."""
    if options.device == "auto":
        options = replace(options, device="cuda" if args.gpus else "cpu")
    if options.device == "cpu" and options.threads is None and args.cpus >= 1:
        options = replace(options, threads=int(args.cpus))
    return options


def _other(given: str, options: Options) -> ModelConfig:
    model, name = named_model(given)
    return ModelConfig(model, (name,), options)


def _names(config: ClusterConfig) -> list[str]:
    return [name for model in config.models for name in model.names]
