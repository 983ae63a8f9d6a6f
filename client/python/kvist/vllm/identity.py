"""Identity of an engine's pools: everything that changes the meaning of a block's bytes.

The fields are made in every process of the engine and must come out equal there, so nothing of a
rank is in them, nor anything that vLLM changes after start. A field too many costs hits; a field
too few serves wrong KV. So configurations go in whole, unknown fields included, except for lists of
fields that are known not to matter.
"""

import dataclasses
import enum
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch
import vllm

from kvist.vllm.config import Refusal, Settings
from kvist.vllm.fingerprint import fingerprint, local_path

# Slot layout: rank-major, then tensor, then block. Another layout: another number.
FORMAT = "1"

# Paths, serving, sampling, tokenisation: none of it changes what a block's KV is. hf_config goes in
# by itself. The weights have their own field.
MODEL_FIELDS_LEFT_OUT = frozenset(
    """
    model model_weights tokenizer tokenizer_mode tokenizer_revision served_model_name hf_token
    revision code_revision hf_config hf_text_config hf_config_path hf_overrides config_format
    max_model_len spec_target_max_model_len enforce_eager max_logprobs logprobs_mode seed
    return_sampling_mask enable_trace_replay skip_tokenizer_init allowed_local_media_path
    allowed_media_domains generation_config override_generation_config enable_sleep_mode
    sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
    enable_nccl_comm_suspend enable_cumem_allocator logits_processors io_processor_plugin
    renderer_num_workers trust_remote_code runner_type convert_type allow_deprecated_quantization
    """.split()
)
# Of the cache configuration what shapes blocks and keys; the rest is sizes that vLLM finds out.
CACHE_FIELDS = (
    "cache_dtype",
    "kv_cache_layout",
    "prefix_caching_hash_algo",
    "prefix_match_unit",
    "sliding_window",
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "kv_sharing_fast_prefill",
    "swa_bounded_replay",
)
PARALLEL_FIELDS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "dcp_kv_cache_interleave_size",
    "cp_kv_cache_interleave_size",
    "enable_expert_parallel",
)
CRYPTO_HASHES = ("sha256", "sha256_cbor")


def canonical(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold and that comes out equal in every process."""
    if depth > 32:
        raise Refusal("kvist: the configuration is nested too deeply to be identified.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype | torch.device | os.PathLike):
        return str(value)
    if isinstance(value, Mapping):
        items = [(str(canonical(k, depth + 1)), canonical(v, depth + 1)) for k, v in value.items()]
        return dict(sorted(items))
    if isinstance(value, list | tuple):
        return [canonical(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(canonical(item, depth + 1), sort_keys=True) for item in value)
    return _canonical_object(value, depth)


def _canonical_object(value: Any, depth: int) -> Any:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return [name, canonical(fields, depth + 1)]
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return [name, canonical(to_dict(), depth + 1)]
    text = repr(value)
    # A default repr has the object's address in it, which says nothing and differs everywhere.
    return name if " at 0x" in text else [name, text]


def digest(value: Any) -> bytes:
    """SHA-256 of a value's canonical JSON, as readable text."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest().encode()


def _pick(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in names}


def _model_fields(model: Any) -> dict[str, Any]:
    fields = {
        field.name: getattr(model, field.name, None)
        for field in dataclasses.fields(model)
        if field.name not in MODEL_FIELDS_LEFT_OUT
    }
    hf = model.hf_config.to_dict()
    hf.pop("_name_or_path", None)
    fields["hf_config"] = hf
    # The rotary table of longrope depends on the longest context that is served.
    if "longrope" in json.dumps(canonical(hf)):
        fields["max_model_len"] = model.max_model_len
    return fields


def _weights(model: Any, load: Any) -> bytes:
    """Which weights these are. I/O: headers and samples of the weight files."""
    load_format = getattr(load.load_format, "value", load.load_format)
    if str(load_format) == "dummy":
        return f"dummy seed {model.seed}".encode()
    if getattr(model, "model_weights", ""):
        raise Refusal(
            f"kvist: the weights come from {model.model_weights} and cannot be identified. "
            "Use a local model directory, or run without kvist."
        )
    path = local_path(model.model, model.revision)
    return fingerprint(path, bool(model.trust_remote_code)).hex().encode()


def _speculative(config: Any) -> list[tuple[str, bytes]]:
    if config is None:
        return [("speculative", b"none")]
    skip = ("target_model_config", "target_parallel_config", "draft_model_config",
            "draft_parallel_config", "draft_load_config")
    fields = {
        field.name: getattr(config, field.name, None)
        for field in dataclasses.fields(config)
        if field.name not in skip
    }
    found = [("speculative", digest(fields))]
    draft = getattr(config, "draft_model_config", None)
    if draft is not None and config.model not in (None, "ngram"):
        load = getattr(config, "draft_load_config", None) or _DefaultLoad()
        found.append(("draft_model", digest(_model_fields(draft))))
        found.append(("draft_weights", _weights(draft, load)))
    return found


class _DefaultLoad:
    load_format = "auto"


def _device(vllm_config: Any) -> str:
    """What decides the byte layout besides the configuration."""
    from vllm.platforms import current_platform

    kind = str(vllm_config.device_config.device_type)
    if kind == "cpu":
        return f"cpu {platform.machine()} {_cpu_flags()}"
    capability = current_platform.get_device_capability()
    return f"{kind} {current_platform.get_device_name()} {capability}"


def _cpu_flags() -> str:
    """Digest of the processor's instruction sets: CPU attention packs its KV for them."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features", "isa"):
                    return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    except OSError:
        pass
    return "unknown"


def hash_seed(vllm_config: Any, private: bytes) -> bytes:
    """What the first block's hash starts from; private when it is random in every engine."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"{algorithm} seed {seed}".encode()
    if algorithm in CRYPTO_HASHES:
        return f"{algorithm} default".encode()
    return f"{algorithm} private ".encode() + private.hex().encode()


def _model_type(model: Any) -> str:
    """Readable, for `kvist pools`: what tells models apart for people."""
    config = getattr(model, "hf_text_config", None) or model.hf_config
    sizes = [
        f"{word} {getattr(config, name)}"
        for name, word in (("num_hidden_layers", "layers"), ("hidden_size", "hidden"))
        if isinstance(getattr(config, name, None), int)
    ]
    return ", ".join([str(getattr(model.hf_config, "model_type", "?")), *sizes])


def engine_fields(
    vllm_config: Any, offloading_config: Any, settings: Settings, private: bytes
) -> list[tuple[str, bytes]]:
    """The fields that all pools of an engine share. I/O: samples the weight files.

    private: bytes that only this engine's processes know, for keys that are random anyway
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    fields: list[tuple[str, bytes]] = [
        ("engine", b"vllm"),
        ("format", FORMAT.encode()),
        ("version", vllm.__version__.encode()),
        ("torch", torch.__version__.encode()),
        ("tenant_label", settings.tenant.encode()),
        ("model_type", _model_type(model).encode()),
        ("model", digest(_model_fields(model))),
        ("weights", _weights(model, vllm_config.load_config)),
        ("load_format", str(vllm_config.load_config.load_format).encode()),
        ("quantization", digest([model.quantization, vllm_config.quant_config and
                                 type(vllm_config.quant_config).__name__])),
        ("dtype", str(model.dtype).encode()),
        ("cache", digest(_pick(cache, CACHE_FIELDS))),
        ("attention", digest(vllm_config.attention_config)),
        ("runner", f"{model.runner_type} v2={vllm_config.use_v2_model_runner}".encode()),
        ("parallel", digest(_pick(vllm_config.parallel_config, PARALLEL_FIELDS))),
        ("hash", hash_seed(vllm_config, private)),
        ("tokens_per_hash", str(offloading_config.cache.tokens_per_hash).encode()),
        ("blocks_per_chunk", str(offloading_config.cache.blocks_per_chunk).encode()),
        ("worker_bytes_per_block", str(offloading_config.worker_kv_bytes_per_block).encode()),
        ("replicated", str(offloading_config.replicated_layout).encode()),
        ("kv_layout", str(offloading_config.kv_cache_layout).encode()),
        ("device", _device(vllm_config).encode()),
        ("additional", digest(getattr(vllm_config, "additional_config", None))),
    ]
    return fields + _speculative(vllm_config.speculative_config)


def group_fields(group: Any, spec_fields: Any) -> list[tuple[str, bytes]]:
    """The fields of one KV cache group's pool."""
    return [
        ("group", str(group.group_id).encode()),
        ("group_tokens_per_block", str(group.tokens_per_block).encode()),
        ("group_layers", digest(list(group.layer_names))),
        ("group_kind", digest(spec_fields)),
    ]
