"""`quire serve`: a model behind OpenAI's API. Its options are in `quire.cli.options`."""

import argparse
import atexit
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.cli.options import DEFAULT_MODEL, USUAL_IDLE_S, USUAL_STEP_TIMEOUT_S
from quire.core.errors import ConfigError, ModelFileError
from quire.llm import AsyncLLM, OnlineModel
from quire.llm.assembly import assemble, read_configuration
from quire.llm.devices import Options
from quire.llm.machine import DEFAULT_KV_BYTES, parse_bytes
from quire.server import ServerSettings, read_keys, serve
from quire.server.connections import read_networks
from quire.server.logs import LogFormat, set_up_logs, take_over_standard_streams
from quire.server.model_folder import ModelFolder
from quire.server.model_service import ModelSource, Replacement
from quire.server.processes.setup import Setup
from quire.server.processes.supervisor import supervise
from quire.server.residency import Residency
from quire.server.runner import PASSWORD_VARIABLE, exit_while_loading
from quire.server.state_folder import check_state_folder
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
    if settings.state_folder is not None:
        check_state_folder(settings.state_folder, is_named=args.state is not None)
    if is_on_demand(args):
        _serve_on_demand(args, settings, options)
        return 0
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


# ---- several models


def is_on_demand(args: argparse.Namespace) -> bool:
    """Whether models are loaded when they are asked for, and unloaded again."""
    given = (args.models, args.model_memory, args.idle_timeout)
    is_named = "=" in args.model and not Path(args.model).exists()
    return bool(args.more_models) or is_named or any(each is not None for each in given)


def _serve_on_demand(args: argparse.Namespace, settings: ServerSettings, options: Options) -> None:
    for value, flag in (
        (args.no_worker, "--no-worker"),
        (args.api_processes != 1, "--api-processes"),
    ):
        if value:
            raise ConfigError(f"{flag} is for a server of one model that is loaded at its start")
    idle_s = USUAL_IDLE_S if args.idle_timeout is None else args.idle_timeout
    if not 0 <= idle_s < math.inf:
        raise ConfigError(f"--idle-timeout must be 0 or more, got {idle_s:g}")
    memory = args.model_memory
    budget = None if memory is None else parse_bytes(memory, "--model-memory")
    if budget == 0:
        raise ConfigError("--model-memory must be above 0")
    residency = Residency(budget, idle_s or None)
    options = _with_kv_memory(options)
    make = partial(_source, options, args.hang)
    folder = None if args.models is None else ModelFolder(args.models, lambda path: make(str(path)))
    sources = [make(*named) for named in _named_models(args)]
    for source in sources:  # what is wrong with them is said now
        source.need()
    if folder is not None:
        found = [make(str(path)) for path in _first_look(folder)]
        taken = {name for source in sources for name in source.names}
        sources += [source for source in found if source.names[0] not in taken]
        if not sources:
            raise ConfigError(
                f"--models {args.models}: there is no GGUF file in it, and no folder of safetensors"
            )
    settings = replace(settings, model_names=sources[0].names)

    def replaced(model: str | None, config: str | None) -> Replacement:
        wanted = _replacement(args, settings, model, config)
        options = _with_kv_memory(wanted.options)
        load = partial(_load_remote, wanted.model, options, args.hang)
        return replace(wanted, options=options, load=load)

    serve(
        settings,
        sources,
        lambda address: _greet(address, settings, residency.names),  # some may be left out
        replace=replaced,
        residency=residency,
        folder=folder,
    )


def _first_look(folder: ModelFolder) -> list[Path]:
    try:
        return folder.look(at_once=True).come
    except OSError as error:
        raise ConfigError(f"--models {folder.path}: {error.strerror}") from error


def _with_kv_memory(options: Options) -> Options:
    """Of one of several models: without a size that of a GPU would take all that is left."""
    if options.kv_memory is not None:
        return options
    return replace(options, kv_memory=DEFAULT_KV_BYTES)


def _named_models(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Models and what they are called."""
    given = [args.model, *args.more_models]
    if args.models is not None and not args.more_models and args.model == DEFAULT_MODEL:
        given = []  # nobody named it
    named = [named_model(each) for each in given]
    if args.served_model_name:
        if len(args.served_model_name) != len(named):
            raise ConfigError(
                f"--served-model-name is there {len(args.served_model_name)} times for "
                f"{len(named)} models: give one for each, or NAME=MODEL instead"
            )
        models = [model for model, _ in named]
        named = list(zip(models, args.served_model_name, strict=True))
    names = [name for _, name in named]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name}: say NAME=MODEL")
    return named


def named_model(given: str) -> tuple[str, str]:
    """MODEL or NAME=MODEL, as the model and its name."""
    name, separator, model = given.partition("=")
    if not separator or Path(given).exists():
        return given, name_of(given)
    if not name or not model:
        raise ConfigError(f"{given}: expected MODEL or NAME=MODEL")
    return model, name


def _source(options: Options, hang_s: float, model: str, name: str | None = None) -> ModelSource:
    load = partial(_load_remote, model, options, hang_s)
    return ModelSource((name or name_of(model),), load, model, options)


# ---- several API processes


def _supervise(
    args: argparse.Namespace, settings: ServerSettings, options: Options, form: LogFormat
) -> None:
    """Several API processes over one worker."""
    if args.no_worker:
        raise ConfigError("--api-processes needs the worker that --no-worker leaves out")

    def load(on_stuck: Callable[[], None], listener: socket.socket) -> RemoteLLM:
        return _load_remote(args.model, options, args.hang, on_stuck, listener)

    def replaced(model: str | None, config: str | None, listener: socket.socket) -> Replacement:
        wanted = _replacement(args, settings, model, config)
        load = partial(_load_remote, wanted.model, wanted.options, args.hang, listener=listener)
        return replace(wanted, load=load)

    setup = Setup(0, args.api_processes, settings, options, form, args.log_level)
    supervise(settings, setup, load, lambda address: _greet(address, settings), replaced)


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
        max_stored_days=args.max_stored_days,
        max_idempotency_keys=args.max_idempotency_keys,
        max_idempotency_bytes=args.max_idempotency_bytes,
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


def _greet(address: str, settings: ServerSettings, names: Sequence[str] = ()) -> None:
    """Where it is and how to try it; on standard output, for a person or a script. `names`: of
    models that are loaded on demand."""
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if settings.keys else ""
    page = f"chat and engine: {address}/, " if settings.page else ""
    served = ", ".join(names) or settings.model_names[0]
    print(f"quire serves {served} at {address}/v1 ({page}API: {address}/docs)")
    print(
        f"try: curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        '-d \'{"messages": [{"role": "user", "content": "What is gravity?"}]}\'',
        flush=True,
    )
