"""Where the ranks are to meet, as one rank sees it before it tries."""

from dataclasses import dataclass

from samestep.doctor.facts.address import is_own, port_is_free
from samestep.doctor.facts.rank import Rank
from samestep.ranks.world import agent_serves


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The master address and port, as one rank sees them."""

    name: str
    port: int
    address: str = ""
    """What the name resolves to here; empty if it does not."""
    listens: bool = False
    """Whether this rank is the one that is to listen there."""
    is_own: bool = True
    """Whether the address is this host's."""
    is_free: bool = True
    """Whether nobody else listens on the port."""
    served_by_agent: bool = False
    """Whether torchrun's agent listens in place of rank 0."""


def read_rendezvous(rank: Rank) -> Rendezvous:
    """Read the facts; the port is tried on rank 0 alone, unless an agent holds it already."""
    launch, address = rank.launch, rank.address.master
    agent = agent_serves()
    listens = launch.rank == 0 and not agent
    return Rendezvous(
        name=launch.master_addr,
        port=launch.master_port,
        address=address,
        listens=listens,
        is_own=is_own(address) if listens and address else True,
        is_free=port_is_free(launch.master_port) if listens else True,
        served_by_agent=agent,
    )
