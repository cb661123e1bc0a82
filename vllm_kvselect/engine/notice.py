"""What the scheduler tells workers about a step, beyond vLLM's own message.

It travels where vLLM carries the metadata of KV connectors: connectors are refused with eviction,
so nothing else uses it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput


class Swap(NamedTuple):
    """What becomes of a request's blocks at a cut.

    Attributes:
        given_back: Its block table up to the cut, null blocks where entries were dropped before.
        fresh: What takes the places of the last of these before the tail.
    """

    given_back: list[int]
    fresh: list[int]


class Found(NamedTuple):
    """A state that a request goes on from: cuts made of it, and id of the first packed block."""

    num_made: int
    first_packed: int


class Load(NamedTuple):
    """A stored context on its way into the cache, and the blocks that wait for it."""

    name: str
    block_ids: list[int]


@dataclass
class StepNotice(KVConnectorMetadata):
    """What is told of the requests of a step.

    Attributes:
        swaps: Requests that make a cut when the step begins. A fresh block may be one that another
            request has just given back: cuts are made in this order.
        found: States that requests go on from that begin, by their ids.
        stores: Names under which requests' contexts are stored once they are compressed.
        loads: Stored contexts that are to be read into blocks, by the number of the load.
        dropped: Numbers of loads whose blocks the workers must not write to any more.
    """

    swaps: dict[str, Swap] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    stores: dict[str, str] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    @property
    def says_something(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.swaps or self.found or self.stores or self.loads or self.dropped)

    def add_to(self, scheduled: SchedulerOutput) -> None:
        """Sends the notice along with a step's message."""
        scheduled.kv_connector_metadata = self

    @classmethod
    def of(cls, scheduled: SchedulerOutput) -> "StepNotice":
        """The notice of a step; an empty one if there is none."""
        notice = scheduled.kv_connector_metadata
        return notice if isinstance(notice, cls) else cls()
