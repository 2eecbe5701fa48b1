"""The options of `quire ray serve`: those of `quire serve`, and the cluster's."""

import argparse
from collections.abc import Sequence
from pkgutil import resolve_name

from quire.cli.options import add_serve_options
from quire.cli.program import CommandParser
from quire.core.errors import ConfigError

_EPILOG = """\
The options of `quire serve` mean the same; those about connections are Serve's own here. MODEL
must mean the same on every node: a path on shared storage or in the image, or a name that each node
fetches. Keys are read where the ingress runs: --api-keys is a file on that node, or QUIRE_API_KEY
is set there. --state is a folder on that node as well, and has no default here: without it,
/v1/files and /v1/batches are refused, and stored responses and quotas of the day end with the
ingress. SIGINT and SIGTERM end the application, and a cluster that was started for it: running
requests have --drain-timeout, a second signal ends them.

Several ingresses (--ingress-replicas) store no responses of /v1/responses and refuse --state,
--audit-log and keys with limits, which each would keep or count by itself.

examples:
  quire ray serve model.gguf --replicas 4 --cpus 8        four replicas of eight CPUs each
  quire ray serve model.gguf --gpus 1 --min-replicas 1 --max-replicas 16
  quire ray serve chat.gguf --also code=coder.gguf        two models behind one endpoint
  quire ray serve model.gguf --state /var/lib/quire       with files and batches
  quire ray serve model.gguf --address head:6379          on the cluster that has this address
  quire ray serve model.gguf --dry-run > serve.yaml       for `serve deploy` or KubeRay
"""

_CONNECTIONS = "Serve's proxy has the connections; a --direct-port has the default"
# Options of `quire serve` about what Ray has in its own hands, by their names in the parser.
NOT_HERE = {
    "tls_cert": "Serve's proxy has no TLS here: put a proxy with a certificate before it",
    "tls_key": "Serve's proxy has no TLS here: put a proxy with a certificate before it",
    "max_connections": _CONNECTIONS,
    "max_connections_per_address": _CONNECTIONS,
    "header_timeout": "Serve's proxy reads the headers; a --direct-port has the default",
    "unread_timeout": "Serve's proxy writes the answers; a --direct-port has the default",
    "keep_alive": _CONNECTIONS,
    "models": "name them: every node must know them",
    "model_memory": "each replica keeps its model",
    "idle_timeout": "--min-replicas says how many stay",
    "no_worker": "each replica is a process of its own",
    "hang": "--replica-silence is for a replica that does not answer",
    "api_processes": "--ingress-replicas says how many answer requests",
    "log_format": "Ray writes the logs",
    "log_level": "Ray writes the logs",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run quire on a Ray cluster. `quire ray serve --help` says more."
    parser.add_argument("action", choices=("serve",), help="serve models through OpenAI's API")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run(args: argparse.Namespace) -> int:
    """Without Ray up to here: what is wrong with the options, and --help, needs none."""
    parsed = parse(args.arguments)
    code: int = resolve_name("quire.cli.ray:serve_models")(parsed, args.arguments)
    return code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = serve_parser()
    args = parser.parse_args(arguments)
    check_options(parser, args)
    return args


def serve_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="quire ray serve", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_serve_options(parser)
    parser.description = "Serve models on a Ray cluster through OpenAI's API, with Ray Serve."
    parser.epilog = _EPILOG
    _add_cluster_options(parser.add_argument_group("the cluster"))
    _add_replica_options(parser.add_argument_group("replicas"))
    return parser


def _add_cluster_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--address",
        metavar="ADDRESS",
        help="of a cluster that runs, or local: a new one on this machine (default: RAY_ADDRESS, "
        "else one that this machine is part of, else local)",
    )
    add("--name", default="quire", help="of the Serve application (default: %(default)s)")
    add(
        "--also",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="another model, with the same options; a request's `model` chooses; may be repeated",
    )
    add(
        "--ingress-replicas",
        type=int,
        default=1,
        metavar="N",
        help="processes that answer requests (default: %(default)s)",
    )
    add(
        "--ingress-cpus",
        type=float,
        default=0.0,
        metavar="N",
        help="reserved for each: HTTP, templates, tokenising (default: %(default)s, as heads of "
        "clusters often offer none)",
    )
    add(
        "--ingress-anywhere",
        action="store_true",
        help="not on the head node alone; a stream ends with its ingress's node",
    )
    add(
        "--direct-port",
        type=int,
        metavar="PORT",
        help="where ingresses listen themselves as well: streams pass no proxy there, and take a "
        "seventh of the processor time",
    )
    add("--dry-run", action="store_true", help="print Serve's configuration and leave")


def _add_replica_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--replicas", type=int, metavar="N", help="of each model, always so many (default: 1)")
    add("--min-replicas", type=int, metavar="N", help="scale with the load from so many ...")
    add("--max-replicas", type=int, metavar="N", help="... to so many")
    add("--cpus", type=float, default=1.0, metavar="N", help="of a replica (default: %(default)s)")
    add("--gpus", type=float, default=0.0, metavar="N", help="of a replica (default: %(default)s)")
    add(
        "--target-load",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="of the batches' slots that scaling aims at (default: %(default)s)",
    )
    add("--upscale-delay", type=float, default=10.0, metavar="S", help="(default: %(default)s)")
    add("--downscale-delay", type=float, default=300.0, metavar="S", help="(default: %(default)s)")
    add(
        "--routing",
        choices=("prefix", "load", "random"),
        default="prefix",
        help="to the replica that has the longest prefix, to the idlest, or by chance, for "
        "comparisons (default: %(default)s)",
    )
    add(
        "--max-lead",
        type=int,
        default=8,
        metavar="N",
        help="requests that a replica may have more than the idlest, for its prefixes "
        "(default: %(default)s)",
    )
    add(
        "--replica-silence",
        type=float,
        default=20.0,
        metavar="S",
        help="a replica that says nothing for so long loses its requests to others "
        "(default: %(default)s)",
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what this command would not obey."""
    for name, why in NOT_HERE.items():
        if getattr(args, name) != parser.get_default(name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"quire ray serve does not take {option}: {why}")
    scaled = args.min_replicas is not None or args.max_replicas is not None
    if args.replicas is not None and scaled:
        raise ConfigError("--replicas is for a fixed number: leave --min/--max-replicas out")
    if args.port == 0:
        raise ConfigError("--port 0: Serve's proxy needs a port of its own")
