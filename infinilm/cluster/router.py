"""The part of the router that Ray Serve runs: it tells a front which replicas are running."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from infinilm.cluster.client import ReplicaAddress, Ticket


class ReplicaLister(RequestRouter):  # type: ignore[misc]
    """Passes its candidates to the ticket of a front.

    Ray Serve knows which replicas run, are stopping or have died. The front knows the contents of their caches from its
    own connections (`infinilm.cluster.client`). So the front chooses a replica for each request, without calling Ray.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ticket = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(ticket, Ticket):
            ticket.note([_address(each.replica_id.unique_id, each.replica_metadata) for each in candidate_replicas])
        return [candidate_replicas]


def _address(replica_id: str, metadata: dict[str, Any]) -> ReplicaAddress:
    return ReplicaAddress(replica_id, metadata["host"], metadata["port"], metadata["node_id"])
