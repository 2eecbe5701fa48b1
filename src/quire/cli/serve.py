"""`quire serve`: a model behind OpenAI's API. Its options are in `quire.cli.options`."""

import argparse
import atexit
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.cli.options import USUAL_STEP_TIMEOUT_S
from quire.core.errors import ConfigError, ModelFileError
from quire.llm import AsyncLLM, OnlineModel
from quire.llm.assembly import assemble, read_configuration
from quire.llm.devices import Options
from quire.server import ServerSettings, read_keys, serve
from quire.server.connections import read_networks
from quire.server.logs import LogFormat, set_up_logs, take_over_standard_streams
from quire.server.processes.setup import Setup
from quire.server.processes.supervisor import supervise
from quire.server.runner import PASSWORD_VARIABLE, exit_while_loading
from quire.server.service import Replacement
from quire.server.usage_file import default_folder
from quire.worker import RemoteLLM

_LEAST_HANG_S = 1.0
_ENGINE_NUMBERS = {  # options that are fields of EngineConfig, and their types
    "max_queue_requests": int,
    "max_queue_tokens": int,
    "batch_timeout_ms": float,
    "slo_itl_ms": float,
    "slo_ttft_ms": float,
}


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if not args.hang >= _LEAST_HANG_S:
        raise ConfigError(f"--hang must be {_LEAST_HANG_S:g} seconds or more, got {args.hang:g}")
    options = options_of(args, settings)
    form: LogFormat = args.log_format or ("text" if sys.stderr.isatty() else "json")
    atexit.register(exit_while_loading)
    take_over_standard_streams(set_up_logs(form, args.log_level))
    if args.api_processes != 1:
        _supervise(args, settings, options, form)
        return 0

    def load(on_stuck: Callable[[], None]) -> OnlineModel:
        if not args.no_worker:
            return _load_remote(args.model, options, args.hang, on_stuck)
        assembly = assemble(args.model, options)
        llm = AsyncLLM.of(assembly, on_stuck)
        _check_template(llm)
        assembly.executor.warm_up()
        return llm

    def replaced(model: str | None, config: str | None) -> Replacement:
        return _replacement(args, settings, model, config)

    serve(settings, load, lambda address: _greet(address, settings), replace=replaced)
    return 0


def _supervise(
    args: argparse.Namespace, settings: ServerSettings, options: Options, form: LogFormat
) -> None:
    """Several API processes over one worker."""
    if args.no_worker:
        raise ConfigError("--api-processes needs the worker that --no-worker leaves out")

    def load(on_stuck: Callable[[], None], listener: socket.socket) -> RemoteLLM:
        return _load_remote(args.model, options, args.hang, on_stuck, listener)

    setup = Setup(0, args.api_processes, settings, options, form, args.log_level)
    supervise(settings, setup, load, lambda address: _greet(address, settings))


def _load_remote(
    model: str,
    options: Options,
    hang_s: float,
    on_stuck: Callable[[], None],
    listener: socket.socket | None = None,
) -> RemoteLLM:
    remote = RemoteLLM.load(model, options, on_stuck, hang_s=hang_s, listener=listener)
    try:
        _check_template(remote)
    except BaseException:
        remote.kill()
        raise
    return remote


def _replacement(
    args: argparse.Namespace, settings: ServerSettings, model: str | None, config: str | None
) -> Replacement:
    """What `quire reload` asks for, with the options that the server was started with."""
    args = argparse.Namespace(**vars(args))
    args.model = args.model if model is None else model
    args.config = args.config if config is None else config
    options = options_of(args, settings)
    return Replacement(
        tuple(args.served_model_name or (name_of(args.model),)),
        args.model,
        None if args.config is None else str(args.config),
        options,
        partial(_load_remote, args.model, options, args.hang),
    )


def settings_of(args: argparse.Namespace) -> ServerSettings:
    return ServerSettings(
        host=args.host,
        port=args.port,
        model_names=tuple(args.served_model_name or (name_of(args.model),)),
        keys=read_keys(args.api_keys, os.environ),
        no_auth=args.no_auth,
        parse_control_tokens=args.parse_control_tokens,
        allowed_hosts=tuple(name.lower() for name in args.allowed_host),
        cors_origins=tuple(args.cors_origin),
        ignore_unknown_fields=args.ignore_unknown_fields,
        trusted_proxies=read_networks(
            name for listed in args.trusted_proxies for name in listed.split(",") if name.strip()
        ),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_key_password=os.environ.get(PASSWORD_VARIABLE),
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address,
        max_stored_responses=args.max_stored_responses,
        max_stored_bytes=args.max_stored_bytes,
        max_file_bytes=args.max_file_bytes,
        max_job_bytes=args.max_job_bytes,
        max_jobs=args.max_jobs,
        max_job_lines=args.max_job_lines,
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
        page=not args.no_page,
        memory_bandwidth=None if args.memory_bandwidth is None else args.memory_bandwidth * 1e9,
    )


def name_of(model: str) -> str:
    """A path would tell clients where the model lies."""
    return Path(model).name if Path(model).exists() else model


def options_of(args: argparse.Namespace, settings: ServerSettings) -> Options:
    """What the file says, with what the command line says put over it."""
    options = Options() if args.config is None else read_configuration(args.config)
    own = (
        *("device", "max_batch_size", "kv_memory", "max_context", "threads", "kv_cache_dtype"),
        *("i2s_packing", "generation_config", "gpu_layers", "gpu_memory", "placement"),
    )
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
    engine.setdefault("step_timeout_s", USUAL_STEP_TIMEOUT_S)
    weights = engine.get("key_weights")
    in_file = weights if isinstance(weights, dict) else {}
    engine["key_weights"] = {**in_file, **settings.keys.weights}
    options = replace(options, **given, engine=engine)
    options.engine_config()  # what is wrong with the options is said before loading
    return options


def _check_template(llm: OnlineModel) -> None:
    """Refuse a model that says it can chat and cannot: whoever starts the server should know."""
    try:
        if llm.prompts.can_chat:
            _ = llm.prompts.template
    except ModelFileError as error:
        raise ModelFileError(
            f"{str(error).rstrip('.')}. --chat-template FILE takes another one, "
            "--no-chat-template serves the model without chats"
        ) from error


def _chosen_template(args: argparse.Namespace) -> str | bool:
    if args.no_chat_template and args.chat_template is not None:
        raise ConfigError("--chat-template names a template and --no-chat-template wants none")
    return False if args.no_chat_template else args.chat_template


def _greet(address: str, settings: ServerSettings) -> None:
    """Where it is and how to try it; on standard output, for a person or a script."""
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if settings.keys else ""
    page = f"chat and engine: {address}/, " if settings.page else ""
    print(f"quire serves {settings.model_names[0]} at {address}/v1 ({page}API: {address}/docs)")
    print(
        f"try: curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        '-d \'{"messages": [{"role": "user", "content": "What is gravity?"}]}\'',
        flush=True,
    )
