"""PrefixRouter: sends a request to the replica that computed the longest prefix of it, unless that
one has many more requests than another."""

import random
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.ray.prefixes import PrefixTable, Replicas, choose


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Serve's hook. A request's second argument is its prefix (see ModelReplica.run).

    `routing`: "prefix"; "load" for the idlest replica; "random" to compare with.
    """

    def initialize_state(self, *, max_lead: int = 8, routing: str = "prefix") -> None:
        self._table = PrefixTable()
        self._max_lead = max_lead
        self._routing = routing
        self._known: list[RunningReplica] | None = None  # what `_running` was made of
        self._running = Replicas(())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        if candidate_replicas is not self._known:  # Serve makes another list when they change
            self._known = candidate_replicas
            self._running = Replicas([replica.replica_id for replica in candidate_replicas])
        ranked = self._ranked(pending_request)
        by_id = self.curr_replicas
        return [[by_id[name]] for name in ranked if name in by_id]

    def _ranked(self, request: PendingRequest | None) -> list[ReplicaID]:
        if self._routing == "random":
            some = self._running.some()
            return random.sample(some, len(some))
        prefix = self._prefix_of(request)
        return choose(prefix, self._running, self._load_of, self._table, self._max_lead)

    def _load_of(self, replica_id: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica_id) or 0

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        del result
        self._table.add(self._prefix_of(pending_request), replica_id)

    def _prefix_of(self, request: PendingRequest | None) -> Sequence[int]:
        if request is None or self._routing != "prefix" or len(request.args) < 2:
            return ()
        prefix: Sequence[int] = request.args[1]
        return prefix
