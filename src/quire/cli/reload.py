"""`quire reload`: have a running server take another model, configuration or version of itself."""

import argparse
import os
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.control import Reload, running_servers, send_reload, socket_folder
from quire.server.usage_file import default_folder


def run(args: argparse.Namespace) -> int:
    state = args.state or default_folder(os.environ)
    if state is None:
        raise ConfigError("there is no state folder: name that of the server by --state")
    process = args.pid if args.pid is not None else _only_server(state)
    config = None if args.config is None else str(Path(args.config).absolute())
    asked = Reload(None if args.model is None else _absolute(args.model), config)
    print(send_reload(state, process, asked, lambda text: print(text, flush=True)))
    return 0


def _absolute(model: str) -> str:
    """The server runs in another folder."""
    return str(Path(model).absolute()) if Path(model).exists() else model


def _only_server(state: Path) -> int:
    found = running_servers(state)
    if not found:
        raise ConfigError(
            f"no server that can reload runs with the state folder {state} "
            f"(there is no socket in {socket_folder(state)}): name its folder by --state"
        )
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise ConfigError(f"several servers run ({numbers}): choose one by --pid")
    return found[0]
