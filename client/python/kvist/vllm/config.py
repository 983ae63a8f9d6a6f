"""Settings from kv_connector_extra_config, and what this plugin refuses to run with."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

# Under vLLM's own logger, so that its handlers and levels apply.
logger = init_logger("vllm.kvist")

# The interface is the same in these; 0.26 and before had another one.
VERSION_FIRST = (0, 30)
VERSION_LAST = (0, 33)

# Keys of vLLM's own offloading code, which pass through untouched.
VLLM_KEYS = frozenset(
    {
        "backpressure",
        "block_size",
        "blocks_per_chunk",
        "cache_policy_module_path",
        "canonical_layout",
        "cpu_bytes_to_use",
        "enable_telemetry",
        "eviction_policy",
        "max_tracker_size",
        "offload_prompt_only",
        "secondary_tiers",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "store_threshold",
    }
)


class Refusal(ValueError):
    """kvist cannot run with this configuration; the text says why and what to do."""


def _seconds(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refusal(
            f"kvist: kv_connector_extra_config['{name}'] is {value!r}; "
            f"it must be a number of seconds from {low:g} to {high:g}."
        )
    return float(value)


@dataclass(frozen=True)
class Settings:
    """What the user chose. Defaults are for production."""

    socket: str | None = None  # None: $KVIST_SOCKET, else the library's default
    verify: bool = False  # check every loaded block's checksum
    tenant: str = ""  # a label that separates pools of otherwise equal engines
    promote_timeout_s: float = 2.0  # how long a request waits for blocks from NVMe
    detach_grace_s: float = 60.0  # how long mapped blocks serve hits while the daemon is away
    copy_threads: int = 1  # threads of the host copy

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        known = cls.__dataclass_fields__.keys()
        for key in extra:
            if key not in known and key not in VLLM_KEYS:
                near = difflib.get_close_matches(key, known, 1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise Refusal(
                    f"kvist: kv_connector_extra_config has the unknown key '{key}'.{hint} "
                    f"kvist knows {', '.join(sorted(known))}."
                )
        verify = extra.get("verify", "never")
        if verify not in ("never", "always"):
            raise Refusal(
                f"kvist: kv_connector_extra_config['verify'] is {verify!r}; "
                "it must be 'never' or 'always'."
            )
        for key in ("socket", "tenant"):
            if not isinstance(extra.get(key, ""), str):
                raise Refusal(f"kvist: kv_connector_extra_config['{key}'] must be a string.")
        threads = extra.get("copy_threads", cls.copy_threads)
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 64:
            raise Refusal(
                f"kvist: kv_connector_extra_config['copy_threads'] is {threads!r}; "
                "it must be a whole number from 1 to 64."
            )
        return cls(
            socket=extra.get("socket"),
            verify=verify == "always",
            tenant=extra.get("tenant", ""),
            promote_timeout_s=_seconds(
                "promote_timeout_s", extra.get("promote_timeout_s", cls.promote_timeout_s), 0, 60
            ),
            detach_grace_s=_seconds(
                "detach_grace_s", extra.get("detach_grace_s", cls.detach_grace_s), 0.001, 86400
            ),
            copy_threads=threads,
        )


def check_version(version: str) -> None:
    """Refuse a vLLM whose offloading interface is not the one that this code was written for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    pair = (int(match[1]), int(match[2])) if match else (0, 0)
    if not VERSION_FIRST <= pair <= VERSION_LAST:
        raise Refusal(
            f"kvist: vLLM {version} is not supported; this version of kvist works with vLLM "
            f"{VERSION_FIRST[0]}.{VERSION_FIRST[1]} to {VERSION_LAST[0]}.{VERSION_LAST[1]}. "
            "Install one of these, or a kvist that knows yours."
        )


def check_engine(vllm_config: Any, offloading_config: Any) -> None:
    """Refuse what would store wrong or unidentifiable bytes."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        raise Refusal(
            "kvist: the ranks of this engine run on several hosts, and kvist shares memory within "
            "one host. Run the engine on one host, or without kvist."
        )
    backend = parallel.distributed_executor_backend
    if backend not in (None, "mp", "uni"):
        raise Refusal(
            f"kvist: the executor backend is {backend!r}, whose workers may be on another host. "
            "Use --distributed-executor-backend mp."
        )
    if parallel.pipeline_parallel_size > 1:
        raise Refusal(
            "kvist: pipeline parallelism is not supported, because the stages' parts of a block "
            "differ in size. Use tensor parallelism."
        )
    if offloading_config.canonical_layout:
        raise Refusal(
            "kvist: canonical_layout is not supported. Remove it from kv_connector_extra_config."
        )
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise Refusal("kvist: HiSparse is not supported. Run without it, or without kvist.")
    if vllm_config.lora_config is not None:
        raise Refusal(
            "kvist: LoRA is enabled. vLLM names cached blocks by an adapter's name and path, not "
            "by its weights, so a changed adapter would be served stale KV. Run without --enable-"
            "lora, or without kvist."
        )
