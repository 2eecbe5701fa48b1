"""`quire serve`: a model behind OpenAI's API."""

import argparse
import atexit
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.options import (
    DEFAULT_MODEL,
    add_cache_type_option,
    add_invariance_option,
    add_template_option,
    add_trust_option,
)

if TYPE_CHECKING:
    from quire.llm import AsyncLLM
    from quire.llm.assembly import Options
    from quire.server import ServerSettings

_ENGINE_NUMBERS = {  # options that are fields of EngineConfig, and their types
    "max_queue_requests": int,
    "max_queue_tokens": int,
    "batch_timeout_ms": float,
    "slo_itl_ms": float,
    "slo_ttft_ms": float,
}
_USUAL_STEP_TIMEOUT_S = 120.0
_DEADLINES = (
    ("header-timeout", 10.0, "for a connection to send its request's head, and for a handshake"),
    ("body-timeout", 30.0, "for a request's body to come"),
    ("unread-timeout", 60.0, "for a client that takes nothing of its answer"),
    ("keep-alive", 65.0, "for a connection between requests"),
)
_EPILOG = """\
examples:
  quire serve                                        the default model on http://127.0.0.1:8000
  quire serve model.gguf --port 9000 --max-batch-size 32
  quire serve model.gguf --config quire.toml         with what `quire bench tune` wrote
  quire serve model.gguf --host 0.0.0.0 --api-keys keys.toml --tls-cert cert.pem --tls-key key.pem

Without keys the server listens on this machine alone and lets everybody on it in. Keys come from
a TOML file or from QUIRE_API_KEY. SIGTERM and Ctrl-C let running requests end, up to
--drain-timeout; a second one ends them at once. SIGHUP reads keys and certificate again. Options
here go before those of --config.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model through OpenAI's API",
        description="Serve a model through OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a safetensors folder, or a name (default: %(default)s)",
    )
    _add_run_options(parser.add_argument_group("running the model"))
    _add_listen_options(parser.add_argument_group("listening"))
    _add_limit_options(parser.add_argument_group("limits"))
    _add_operation_options(parser.add_argument_group("operation"))


def _add_run_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML: [engine] and [run]")
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or reference")
    group.add_argument("--max-batch-size", type=int, metavar="N", help="sequences a step")
    group.add_argument(
        "--kv-memory", metavar="SIZE", help='memory for keys and values, such as "512MiB"'
    )
    group.add_argument(
        "--max-context", type=int, metavar="N", help="hold prompt and completion to N tokens"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads to compute on")
    add_cache_type_option(group, None)
    add_invariance_option(group)
    add_template_option(group)
    group.add_argument(
        "--no-chat-template",
        action="store_true",
        help="refuse chats: for a model whose template does not compile, or to serve text alone",
    )
    add_trust_option(group)
    group.add_argument(
        "--batch-timeout-ms", type=float, metavar="MS", help="longest wait for company"
    )
    group.add_argument("--slo-itl-ms", type=float, metavar="MS", help="target between tokens")
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="target to the first token")
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        help=f"a step that takes longer has hung (default: {_USUAL_STEP_TIMEOUT_S:g})",
    )


def _add_listen_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be repeated (default: MODEL's name)",
    )
    group.add_argument("--api-keys", type=Path, metavar="FILE", help="TOML: [keys.NAME] tables")
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM: speak https with this certificate chain"
    )
    group.add_argument(
        "--tls-key",
        type=Path,
        metavar="FILE",
        help="PEM: its private key, if that is not in the same file; "
        "the password of an encrypted one comes from QUIRE_TLS_KEY_PASSWORD",
    )
    group.add_argument(
        "--trusted-proxies",
        action="append",
        default=[],
        metavar="ADDRESSES",
        help="addresses or networks, such as 10.0.0.0/8,::1, whose X-Forwarded-For or Forwarded "
        "says whom they speak for; may be repeated",
    )
    group.add_argument(
        "--no-auth", action="store_true", help="let other machines in although there are no keys"
    )
    group.add_argument(
        "--parse-control-tokens",
        action="store_true",
        help="without keys: chat messages may write control tokens such as <|im_end|>",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that clients reach the server by; may be repeated",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page that may use the server, as https://HOST; may be repeated",
    )


def _add_limit_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--max-queue-requests", type=int, metavar="N", help="that may wait")
    group.add_argument("--max-queue-tokens", type=int, metavar="N", help="that may wait")
    group.add_argument(
        "--request-timeout", type=float, metavar="S", help="of requests that bring none"
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="of a request; more is a 413 (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        default=4096,
        metavar="N",
        help="open at a time, fewer where descriptors are (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="of them from one client, an IPv6 /64 being one; loopback has no such limit "
        "(default: an eighth of all)",
    )
    for name, default, help_text in _DEADLINES:
        group.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{help_text} (%(default)s)"
        )


def _add_operation_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="what running requests get after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--ping-interval",
        type=float,
        default=15.0,
        metavar="S",
        help="between comments in a silent stream (default: %(default)s)",
    )
    group.add_argument(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="write logins that failed, refusals, reloads and the like there, in a hash chain "
        "that `quire audit` checks",
    )
    group.add_argument(
        "--audit-key", type=Path, metavar="FILE", help="holds a secret to make the hashes with"
    )
    group.add_argument(
        "--audit-requests", action="store_true", help="a line a request there as well"
    )
    group.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="where keys' quotas of the day outlive the server (default: STATE_DIRECTORY, or "
        "quire under XDG_STATE_HOME or ~/.local/state)",
    )
    group.add_argument(
        "--log-format", choices=("json", "text"), help="(default: text on a terminal, else json)"
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    group.add_argument(
        "--otlp-endpoint",
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        metavar="URL",
        help="send traces there (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        import quire.server
    except ImportError as error:
        from quire.core.errors import ConfigError

        raise ConfigError(
            f"the server's packages are not installed ({error.name}): pip install 'quire[server]'"
        ) from error
    from quire.server.logs import LogFormat, set_up_logs, take_over_standard_streams
    from quire.server.runner import exit_while_loading

    settings = _settings(args)
    options = _options(args, settings)
    form: LogFormat = args.log_format or ("text" if sys.stderr.isatty() else "json")
    atexit.register(exit_while_loading)
    take_over_standard_streams(set_up_logs(form, args.log_level))

    def load(on_stuck: Any) -> "AsyncLLM":
        from quire.llm import AsyncLLM
        from quire.llm.assembly import assemble

        assembly = assemble(args.model, options)
        llm = AsyncLLM.of(assembly, on_stuck)
        _check_template(llm)
        assembly.executor.warm_up()
        return llm

    quire.server.serve(settings, load, lambda address: _greet(address, settings))
    return 0


def _settings(args: argparse.Namespace) -> "ServerSettings":
    from quire.server import ServerSettings, read_keys
    from quire.server.addresses import read_networks
    from quire.server.tls import PASSWORD_VARIABLE
    from quire.server.usage_file import default_folder

    return ServerSettings(
        host=args.host,
        port=args.port,
        model_names=tuple(args.served_model_name or (_name_of(args.model),)),
        keys=read_keys(args.api_keys, os.environ),
        no_auth=args.no_auth,
        parse_control_tokens=args.parse_control_tokens,
        allowed_hosts=tuple(name.lower() for name in args.allowed_host),
        cors_origins=tuple(args.cors_origin),
        trusted_proxies=read_networks(
            name for listed in args.trusted_proxies for name in listed.split(",") if name.strip()
        ),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_key_password=os.environ.get(PASSWORD_VARIABLE),
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address,
        header_timeout_s=args.header_timeout,
        body_timeout_s=args.body_timeout,
        unread_timeout_s=args.unread_timeout,
        keep_alive_s=args.keep_alive,
        drain_timeout_s=args.drain_timeout,
        ping_interval_s=args.ping_interval,
        otlp_endpoint=args.otlp_endpoint or None,
        audit_log=args.audit_log,
        audit_key=args.audit_key,
        audit_requests=args.audit_requests,
        state_folder=args.state or default_folder(os.environ),
    )


def _name_of(model: str) -> str:
    """A path would tell clients where the model lies."""
    return Path(model).name if Path(model).exists() else model


def _options(args: argparse.Namespace, settings: "ServerSettings") -> "Options":
    """What the file says, with what the command line says put over it."""
    from quire.llm.assembly import Options
    from quire.llm.configuration import read_configuration

    options = Options() if args.config is None else read_configuration(args.config)
    own = ("device", "max_batch_size", "kv_memory", "max_context", "threads", "kv_cache_dtype")
    given = {name: getattr(args, name) for name in own if getattr(args, name) is not None}
    if args.no_invariant:
        given["invariant"] = False
    if args.trust_model_file:
        given["trust_model_file"] = True
    if args.no_chat_template or args.chat_template is not None:
        given["chat_template"] = _chosen_template(args)
    engine = dict(options.engine)
    for name, kind in _ENGINE_NUMBERS.items():
        if getattr(args, name) is not None:
            engine[name] = kind(getattr(args, name))
    if "batch_timeout_ms" in engine:
        given["batch_timeout_ms"] = engine.pop("batch_timeout_ms")
    if args.request_timeout is not None:
        engine["timeout_s"] = args.request_timeout
    if args.step_timeout is not None:
        engine["step_timeout_s"] = args.step_timeout
    engine.setdefault("step_timeout_s", _USUAL_STEP_TIMEOUT_S)
    engine["key_weights"] = {**engine.get("key_weights", {}), **settings.keys.weights}
    options = replace(options, **given, engine=engine)
    options.engine_config()
    _ = options.executor  # what is wrong with either is said before loading
    return options


def _check_template(llm: "AsyncLLM") -> None:
    """Refuse a model that says it can chat and cannot: whoever starts the server should know."""
    from quire.core.errors import ModelFileError

    try:
        if llm.prompts.can_chat:
            _ = llm.prompts.template
    except ModelFileError as error:
        raise ModelFileError(
            f"{str(error).rstrip('.')}. --chat-template FILE takes another one, "
            "--no-chat-template serves the model without chats"
        ) from error


def _chosen_template(args: argparse.Namespace) -> str | bool:
    from quire.core.errors import ConfigError

    if args.no_chat_template and args.chat_template is not None:
        raise ConfigError("--chat-template names a template and --no-chat-template wants none")
    return False if args.no_chat_template else args.chat_template


def _greet(address: str, settings: "ServerSettings") -> None:
    """Where it is and how to try it; on standard output, for a person or a script."""
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if settings.keys else ""
    print(f"quire serves {settings.model_names[0]} at {address}/v1 (see {address}/docs)")
    print(
        f"try: curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        '-d \'{"messages": [{"role": "user", "content": "What is gravity?"}]}\'',
        flush=True,
    )
