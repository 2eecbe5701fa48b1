"""What API processes share: the supervisor's book of it."""

import os
from typing import Any

from quire.server import ServerSettings
from quire.server.processes import messages as wire
from quire.server.processes.client import IdleCounts
from quire.server.processes.hub import Client, Hub
from quire.server.service import Service


def never(_: object) -> Any:
    raise AssertionError


def test_nothing_is_kept_of_addresses_that_left() -> None:
    descriptor = IdleCounts.create(1)
    hub = Hub(Service(ServerSettings(), never), IdleCounts(descriptor, 1))
    os.close(descriptor)
    client = Client(0)
    hub.enter(client)
    for number in range(100):
        group = f"192.0.2.{number}"
        assert hub.call(client, wire.OpenConnection(group)) == wire.Reply()
        assert hub.call(client, wire.OpenProxied(group)) == wire.Reply()
        assert client.num_open == 1
        hub.call(client, wire.CloseProxied(group))
        hub.call(client, wire.CloseConnection(group))
    assert (len(client.groups), len(client.proxied), client.num_open) == (0, 0, 0)
