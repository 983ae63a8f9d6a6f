"""What the manager knows of a request: its chain of keys, leases, and blocks on their way."""

from collections.abc import Iterable, Iterator

import kvist

# A key of vLLM's ends in four bytes that name the KV cache group.
GROUP_BYTES = 4


# One lease: an item of a batch. A plain tuple, because a long prompt makes hundreds in one lookup.
Held = tuple[kvist.Leases, int]


def runs(items: Iterable[Held]) -> Iterator[tuple[kvist.Leases, int, int]]:
    """(batch, start, stop) of neighbours in a batch, in the order of the items."""
    batch: kvist.Leases | None = None
    start = stop = 0
    for item_batch, index in items:
        if item_batch is batch and index == stop:
            stop += 1
            continue
        if batch is not None:
            yield batch, start, stop
        batch, start, stop = item_batch, index, index + 1
    if batch is not None:
        yield batch, start, stop


def release(items: Iterable[Held]) -> None:
    """Give leases back."""
    for batch, start, stop in runs(items):
        batch.release(start, stop)


class Chain:
    """The keys of a request in one group, in prefix order, and what is known of them."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []  # vLLM's
        self.packed = b""  # kvist's, n*32
        self.index: dict[bytes, int] = {}
        self.pending: set[int] = set()  # on their way from NVMe
        self.step_miss: int | None = None  # in this step, a miss from here on
        self.end: int | None = None  # for this request, a miss from here on

    def extend(self, keys: list[bytes]) -> None:
        """Take over a longer (or another) list of keys."""
        known = len(self.keys)
        if keys[:known] != self.keys:
            known = 0
            self.packed = b""
            self.index = {}
            self.pending = set()
            self.step_miss = self.end = None
        fresh = keys[known:]
        self.packed += kvist.pack_keys(fresh, GROUP_BYTES)
        self.index.update((key, i) for i, key in enumerate(fresh, known))
        self.keys = list(keys)

    def key(self, index: int) -> bytes:
        return self.packed[index * kvist.KEY_BYTES : (index + 1) * kvist.KEY_BYTES]

    def is_miss(self, index: int) -> bool:
        return (self.end is not None and index >= self.end) or (
            self.step_miss is not None and index >= self.step_miss
        )

    def give_up(self, index: int) -> None:
        """From here on it is a miss for this request, for good."""
        self.end = index if self.end is None else min(self.end, index)
        self.pending = {i for i in self.pending if i < self.end}


class Request:
    """A request of the engine, from its first lookup until it has finished."""

    def __init__(self, req_id: str, group_count: int) -> None:
        self.req_id = req_id
        self.chains = [Chain() for _ in range(group_count)]
        self.held: dict[bytes, Held] = {}  # leased, and not yet in a load
        self.barred = False  # a load failed: recompute, do not load again
        self.deadline_s = 0.0  # for blocks from NVMe; 0: none was waited for yet
        self.stalled_s = 0.0  # gives up then, unless something comes before
        self.asked_s = 0.0
        self.polled_s = 0.0
        self.polled_step = -1
        self.promoted: set[bytes] = set()
        self.touched: set[bytes] = set()

    @property
    def waiting(self) -> bool:
        return any(chain.pending for chain in self.chains)

    def drop(self) -> None:
        """Give back what no load has taken."""
        release(self.held.values())
        self.held.clear()

    def restart(self) -> None:
        """Forget what was found: the pools have been replaced."""
        self.drop()
        self.chains = [Chain() for _ in self.chains]
        self.promoted.clear()
        self.touched.clear()
