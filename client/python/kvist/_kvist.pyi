"""Binding of libkvist and of the copy library.

Keys: a call that takes `keys` accepts n*32 packed bytes (no copying) or a list of bytes; shorter
keys are zero-extended, longer ones hashed. Units: bytes, and seconds where a name ends in _s.
Ownership: Leases, Takes -> Pool -> Client -> Copy hold references, so an object never outlives what
it stands on. Threads: any, but one at a time for a Copy. Nothing on the data path waits for the
daemon; calls that may take more than 50 us drop the GIL.
"""

from collections.abc import Buffer
from typing import Final, final

Keys = bytes | list[bytes]

class Error(Exception):
    status: str  # a name of status.h: "UNAVAILABLE", "TIMED_OUT", "BUSY", ...

TOOL: Final[int]
SCHEDULER: Final[int]
WORKER: Final[int]
ENGINE: Final[int]
MISS: Final[int]
READY: Final[int]
NVME: Final[int]
LOADING: Final[int]
STORE: Final[int]
LOAD: Final[int]
HOST: Final[int]
DIRECT: Final[int]
STAGED: Final[int]
KEY_BYTES: Final[int]
TAKE_BYTES: Final[int]
RANKS_MAX: Final[int]
SESSION_POOLS_MAX: Final[int]
BLOCK_BYTES_MIN: Final[int]
BLOCK_BYTES_MAX: Final[int]
COPY_RANGES_MAX: Final[int]
COPY_TENSORS_MAX: Final[int]

def pack_keys(keys: list[bytes], drop: int = 0, /) -> bytes:
    """n keys as n*32 bytes; the last `drop` bytes of each are left out."""

def copy_available(kind: int, device: int = 0, /) -> bool:
    """Whether a kind of Copy can work here."""

@final
class Client:
    """One process's connection. Connects by itself, again after the daemon was away."""

    def __init__(
        self,
        role: int,
        session_id: bytes = b"",  # 16 bytes, equal in all processes of the engine
        socket: str | None = None,  # None: $KVIST_SOCKET, else /run/kvist/kvist.sock
        rank: int = 0,
        rank_count: int = 1,
        name: str = "",
        detach_grace_s: float = 0.0,  # 0: the library's default, 60 s
        copy: Copy | None = None,  # segments are registered with it as they come
    ) -> None: ...
    @property
    def connected(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> None:
        """Until connected. Error: TIMED_OUT, or the daemon's refusal."""

    def last_error(self) -> tuple[str, str] | None:
        """(status, sentence) of the latest refusal or connection error."""

    def stats(self) -> dict[str, int]: ...
    def open_pool(
        self,
        fields: list[tuple[str, bytes]],  # the identity, in a fixed order
        slot_bytes: int,  # all ranks' parts of a block
        sparse: bool = False,
        read_only: bool = False,
        shape: bytes | None = None,
    ) -> Pool: ...
    def close(self) -> None:
        """Error BUSY while a pin is held or a call runs. Pools, leases, takes become unusable."""

@final
class Pool:
    @property
    def id(self) -> bytes: ...  # 32 bytes; zeros until it is open
    @property
    def slot_bytes(self) -> int: ...
    @property
    def instance(self) -> int: ...  # the arena that slot numbers mean; 0: none yet
    @property
    def held(self) -> int: ...  # leases and takes that have not been given back
    def wait(self, timeout_s: float, /) -> None: ...
    def probe(self, keys: Keys, start: int = 0, stop: int | None = None, /) -> bytes:
        """One byte a key: MISS, READY, NVME or LOADING."""

    def acquire(
        self, keys: Keys, start: int = 0, stop: int | None = None, /
    ) -> tuple[Leases, int]:
        """Lease the leading run; and why it ended (READY: it did not)."""

    def touch(self, keys: Keys, start: int = 0, stop: int | None = None, /) -> None: ...
    def prefetch(self, keys: Keys, start: int = 0, stop: int | None = None, /) -> bool:
        """Posted. False: not all could be asked for."""

    def take(self, count: int, /) -> Takes:
        """Up to count granted slots; fewer, down to none, when the grant is used up."""

    def pin(self, instance: int, /) -> bool:
        """Keep an arena's mappings. False: it is gone."""

    def unpin(self, instance: int, /) -> None: ...
    def slot_address(self, instance: int, slot: int, /) -> int | None: ...
    def mark(self, takes: bytes, /) -> int:
        """Set this rank's fill marks; how many could not be set. `takes`: Takes.tobytes()."""

    def verify(self, keys: Keys, slots: bytes, instance: int, block_bytes: int, /) -> bytes:
        """One status number of status.h a slot, over its whole block."""

    def close(self) -> None:
        """Error BUSY while leases, takes or pins are held."""

@final
class Leases:
    """Leased blocks. Released when dropped, or in parts before that."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> bytes: ...  # n native uint32
    @property
    def instance(self) -> int: ...
    @property
    def held(self) -> int: ...
    def release(self, start: int = 0, stop: int | None = None, /) -> None: ...

@final
class Takes:
    """Taken slots. To be committed or untaken: dropped ones stay taken until the session ends."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> bytes: ...  # n native uint32
    @property
    def instance(self) -> int: ...
    def tobytes(self) -> bytes: ...  # n*TAKE_BYTES, for Pool.mark() in the ranks
    def commit(
        self,
        keys: Keys,  # of takes [start, stop), in prefix order
        parent: bytes | None,  # key of the block before the first
        block_bytes: int,
        start: int = 0,
        stop: int | None = None,
        /,
    ) -> bool:
        """Posted. False: the daemon is away, the takes are void."""

    def untake(self, start: int = 0, stop: int | None = None, /) -> None: ...

@final
class Layout:
    """Where a chunk's blocks lie in a slot."""

    def __init__(self, refs: list[tuple[int, int, int]], blocks_per_chunk: int) -> None:
        """refs: (tensor, bytes, slot_offset); block b lies at slot_offset + b * bytes."""

    @property
    def slot_bytes(self) -> int: ...

@final
class Copy:
    def __init__(
        self,
        kind: int,
        tensors: list[tuple[int, int, int, int]],  # base, block count, stride, page; kept alive
        device: int = 0,
        staging_bytes: int = 0,
        threads: int = 0,
    ) -> None: ...
    def submit(
        self,
        job: int,
        direction: int,
        pool: Pool,
        instance: int,  # pinned by the caller until the job is reported
        slots: bytes,  # n native uint32
        layout: Layout,
        block_ids: Buffer,  # native int32, C-contiguous
        skip: int = 0,  # blocks that the first chunk lacks
        stream: int = 0,  # cudaStream_t
        /,
    ) -> tuple[bool, list[int]]:
        """(submitted, indices of slots that are not mapped here and were left out)."""

    def poll(self) -> list[tuple[int, bool, int, int]]:
        """Ended jobs: (job, ok, bytes, elapsed_us)."""

    def wait(self, job: int, /) -> None: ...
    def close(self) -> None: ...
