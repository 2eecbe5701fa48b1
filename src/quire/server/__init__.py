"""The HTTP server: OpenAI's API over the live batch."""

from quire.server.app import create_app
from quire.server.keys import KeyRing, read_keys
from quire.server.runner import serve
from quire.server.service import Service
from quire.server.settings import ServerSettings

__all__ = ["KeyRing", "ServerSettings", "Service", "create_app", "read_keys", "serve"]
