"""What all processes of one engine agree on: session, groups, sizes, pools."""

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import kvist
from kvist.vllm import identity
from kvist.vllm.config import Refusal, Settings, check_engine, logger

# Two generations of each group's pool may be open while one replaces the other.
GROUPS_MAX = kvist.SESSION_POOLS_MAX // 2


@dataclass
class Construction:
    """What the connector knows and hands to the spec that vLLM makes inside its constructor."""

    vllm_config: Any
    kv_cache_config: Any
    spec: Any = None  # set by the spec


_construction: contextvars.ContextVar[Construction | None] = contextvars.ContextVar(
    "kvist_construction", default=None
)


@contextlib.contextmanager
def constructing(vllm_config: Any, kv_cache_config: Any) -> Iterator[Construction]:
    """Within it, a KvistOffloadingSpec belongs to the connector that is being made."""
    construction = Construction(vllm_config, kv_cache_config)
    token = _construction.set(construction)
    try:
        yield construction
    finally:
        _construction.reset(token)


def current_construction() -> Construction:
    construction = _construction.get()
    if construction is None:
        raise Refusal(
            "kvist: KvistOffloadingSpec needs kvist's connector, which turns failed loads and "
            'stores into recomputation. Add "kv_connector_module_path": "kvist.vllm" to '
            "--kv-transfer-config (kv_connector stays OffloadingConnector)."
        )
    return construction


@dataclass(frozen=True)
class Group:
    """One KV cache group and its pool."""

    group_id: int  # as in the keys' last four bytes
    sparse: bool  # sliding windows: chunks stand alone
    fields: list[tuple[str, bytes]]  # of the pool's identity, besides the engine's


@dataclass
class Engine:
    """An engine as its processes see it. Made in each of them from the same configuration."""

    settings: Settings
    session_id: bytes
    name: str
    rank: int
    rank_count: int
    replicated: bool  # all ranks' bytes are equal: one copy is kept
    blocks_per_chunk: int
    part_bytes: int  # a rank's part of a slot, and the part's offset per rank
    groups: list[Group]
    vllm_config: Any = field(repr=False)
    offloading_config: Any = field(repr=False)
    _fields: list[tuple[str, bytes]] | None = field(default=None, repr=False)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: all ranks' parts."""
        return self.part_bytes * (1 if self.replicated else self.rank_count)

    @property
    def part_offset(self) -> int:
        return 0 if self.replicated else self.rank * self.part_bytes

    def client(self, role: int, copy: kvist.Copy | None = None) -> kvist.Client:
        return kvist.Client(
            role,
            session_id=self.session_id,
            socket=self.settings.socket,
            rank=self.rank,
            rank_count=self.rank_count,
            name=self.name,
            detach_grace_s=self.settings.detach_grace_s,
            copy=copy,
        )

    def open_pools(
        self, client: kvist.Client, generation: bytes, shape: bytes | None = None
    ) -> list[kvist.Pool]:
        """One pool a group, of a weights generation. The first call samples the weights."""
        if self._fields is None:
            self._fields = identity.engine_fields(
                self.vllm_config, self.offloading_config, self.settings, self.session_id
            )
        return [
            client.open_pool(
                [*self._fields, ("weights_generation", generation.hex().encode()), *group.fields],
                self.block_bytes,
                sparse=group.sparse,
                shape=shape,
            )
            for group in self.groups
        ]


def _group(group: Any, kv_cache_config: Any, blocks_per_chunk: int) -> Group:
    spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
    # The scheduler's configuration has one representative where workers have all layers' specs.
    layer = next(iter(spec.kv_cache_specs.values())) if isinstance(
        spec, UniformTypeKVCacheSpecs
    ) else spec
    # Exactly these: subclasses keep something else, or keep it in another way.
    if type(layer) is SlidingWindowSpec:
        if blocks_per_chunk > 1:
            raise Refusal(
                "kvist: this model has sliding-window layers, and this vLLM loses track of their "
                "blocks when a chunk has more than one. Remove block_size and blocks_per_chunk "
                "from kv_connector_extra_config, so that a chunk is one block."
            )
    elif type(layer) not in (FullAttentionSpec, MLAAttentionSpec):
        raise Refusal(
            f"kvist: this model keeps its state as {type(layer).__name__}, which kvist cannot "
            "store yet. Run it without kvist."
        )
    # Only what every representation of the group has; sizes are in the engine's fields.
    kind = [
        type(layer).__name__,
        layer.block_size,
        layer.dtype,
        getattr(layer, "sliding_window", None),
    ]
    return Group(
        group_id=group.group_id,
        sparse=type(layer) is SlidingWindowSpec,
        fields=identity.group_fields(group, kind),
    )


def _part_bytes(offloading_config: Any) -> int:
    part = offloading_config.worker_kv_bytes_per_block * offloading_config.cache.blocks_per_chunk
    ranks = 1 if offloading_config.replicated_layout else offloading_config.parallel.world_size
    if part <= 0 or part * ranks > kvist.BLOCK_BYTES_MAX:
        raise Refusal(
            f"kvist: a chunk has {part * ranks} bytes of KV; 1 to {kvist.BLOCK_BYTES_MAX} are "
            "possible. Set a smaller block_size in kv_connector_extra_config."
        )
    return part


def make_engine(construction: Construction, offloading_config: Any) -> Engine:
    """Check the configuration and describe the engine. No I/O."""
    vllm_config = construction.vllm_config
    settings = Settings.parse(offloading_config.extra_config)
    check_engine(vllm_config, offloading_config)
    parallel = offloading_config.parallel
    if parallel.world_size > kvist.RANKS_MAX:
        raise Refusal(
            f"kvist: {parallel.world_size} ranks; at most {kvist.RANKS_MAX} are possible."
        )
    if len(offloading_config.groups) > GROUPS_MAX:
        raise Refusal(
            f"kvist: this model has {len(offloading_config.groups)} KV cache groups; at most "
            f"{GROUPS_MAX} are possible. Run it without kvist."
        )
    # engine_id is random unless the user sets it, and differs per data-parallel rank; instance_id
    # differs from start to start. Both reach all processes of the engine.
    seed = f"{offloading_config.engine_id}\0{vllm_config.instance_id}"
    engine = Engine(
        settings=settings,
        session_id=hashlib.sha256(seed.encode()).digest()[:16],
        name=f"vllm {offloading_config.engine_id}"[:100],
        rank=parallel.rank,
        rank_count=parallel.world_size,
        replicated=bool(offloading_config.replicated_layout),
        blocks_per_chunk=offloading_config.cache.blocks_per_chunk,
        part_bytes=_part_bytes(offloading_config),
        groups=[
            _group(group, construction.kv_cache_config, offloading_config.cache.blocks_per_chunk)
            for group in offloading_config.groups
        ],
        vllm_config=vllm_config,
        offloading_config=offloading_config,
    )
    logger.debug("kvist: session %s rank %d", engine.session_id.hex(), engine.rank)
    return engine
