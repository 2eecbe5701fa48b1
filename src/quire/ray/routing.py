"""PrefixRouter: sends a request to the replica that computed the longest prefix of it, unless that
one has many more requests than another."""

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.ray.prefixes import PrefixTable, choose


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Serve's hook. A request's second argument is its prefix (see ModelReplica.run)."""

    def initialize_state(self, *, max_lead: int = 8, uses_prefixes: bool = True) -> None:
        self._table = PrefixTable()
        self._max_lead = max_lead
        self._uses_prefixes = uses_prefixes

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        ranked = choose(self._prefix_of(pending_request), loads, self._table, self._max_lead)
        return [[by_id[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        del result
        self._table.add(self._prefix_of(pending_request), replica_id)

    def _prefix_of(self, request: PendingRequest | None) -> Sequence[int]:
        if request is None or not self._uses_prefixes or len(request.args) < 2:
            return ()
        prefix: Sequence[int] = request.args[1]
        return prefix
