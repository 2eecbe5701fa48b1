"""Setup: what an API process is started with, as plain data."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec

from quire.llm.devices import Options
from quire.server.connections import read_networks
from quire.server.keys import ApiKey, KeyRing
from quire.server.logs import LogFormat
from quire.server.settings import ServerSettings


@dataclass(frozen=True)
class Setup:
    index: int
    num_processes: int
    settings: ServerSettings
    options: Options
    log_format: LogFormat
    log_level: str
    has_key_file: bool = False
    is_replacement: bool = False  # of a process that died, on a server that is ready

    def encode(self) -> bytes:
        settings = {each.name: getattr(self.settings, each.name) for each in fields(self.settings)}
        settings["trusted_proxies"] = list(map(str, self.settings.trusted_proxies))
        options = {each.name: getattr(self.options, each.name) for each in fields(self.options)}
        return msgspec.msgpack.encode(
            [settings, options, replace(self, settings=None, options=None)],  # type: ignore[arg-type]
            enc_hook=_to_plain,
        )

    @classmethod
    def decode(cls, content: bytes) -> "Setup":
        settings, options, rest = msgspec.msgpack.decode(content)
        for each in fields(ServerSettings):
            value = settings[each.name]
            if isinstance(value, list):
                settings[each.name] = tuple(value)
            elif each.type == Path | None and value is not None:
                settings[each.name] = Path(value)
        settings["trusted_proxies"] = read_networks(settings["trusted_proxies"])
        settings["keys"] = KeyRing(msgspec.convert(settings["keys"], list[ApiKey]))
        rest["settings"] = ServerSettings(**settings)
        rest["options"] = Options(**options)
        return cls(**rest)


def _to_plain(value: object) -> object:
    if isinstance(value, KeyRing):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no plain data")
