"""The part of the router that Ray Serve runs: it shows a front the replicas that are running."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from infinilm.cluster.client import ReplicaAddress, Ticket


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Asks the ticket of a request for the choice.

    Ray Serve knows which replicas run, drain and have died. What their caches hold is known to the front, whose
    connections bring it (`infinilm.cluster.client`), so the front's `Scoreboard` chooses among Ray Serve's candidates.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ticket = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(ticket, Ticket):  # not a request of ours
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        addresses = [_address(replica_id, replica.replica_metadata) for replica_id, replica in by_id.items()]
        chosen = ticket.choose(addresses)
        return [[by_id[chosen]] if chosen is not None else candidate_replicas]


def _address(replica_id: str, metadata: dict[str, Any]) -> ReplicaAddress:
    return ReplicaAddress(replica_id, metadata["host"], metadata["port"], metadata["node_id"])
