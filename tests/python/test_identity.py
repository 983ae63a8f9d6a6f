"""Identity, weights fingerprint, settings and refusals of the vLLM plugin, with real configurations
of real (tiny) models."""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import types
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvist.vllm import identity
from kvist.vllm.config import Refusal, Settings, check_engine, check_version
from kvist.vllm.engine import current_construction
from kvist.vllm.fingerprint import fingerprint, local_path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def make_model(path: pathlib.Path, seed: int = 0, **changes) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    torch.manual_seed(seed)
    tensors = {
        f"model.layers.{i}.{name}.weight": torch.randn(64, 64)
        for i in range(2)
        for name in ("a", "b")
    }
    save_file(tensors, str(path / "model.safetensors"), {"format": "pt"})
    return str(path)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    return make_model(tmp_path / "model")


def vllm_config(model: str, **options):
    arguments = {"max_model_len": 1024, "skip_tokenizer_init": True, "enforce_eager": True}
    return EngineArgs(model=model, **arguments | options).create_engine_config()


def offloading_config(**changes) -> OffloadingConfig:
    base = OffloadingConfig(
        groups=(OffloadingGroupConfig(128, ("model.layers.0", "model.layers.1"), 0),),
        worker_kv_bytes_per_block=32768,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("m", "bfloat16"),
        cache=OffloadingCacheConfig(128, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBHNC",
    )
    return dataclasses.replace(base, **changes)


def fields_of(model: str, settings: Settings | None = None, offload=None, **options):
    return identity.engine_fields(
        vllm_config(model, **options), offload or offloading_config(), settings or Settings(), b"p"
    )


def test_equal_engines_have_equal_identities(model: str, tmp_path: pathlib.Path) -> None:
    one = fields_of(model)
    assert one == fields_of(model)
    assert one == fields_of(model, max_model_len=512, max_num_seqs=3, gpu_memory_utilization=0.5)
    assert one == fields_of(make_model(tmp_path / "elsewhere"))
    assert len({name for name, _ in one}) == len(one)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}},
        {"hf_overrides": {"some_unknown_field": 1}},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
        {"load_format": "dummy"},
    ],
)
def test_each_option_makes_another_pool(model: str, change: dict) -> None:
    assert fields_of(model) != fields_of(model, **change)


def test_settings_and_sizes_make_another_pool(model: str, monkeypatch) -> None:
    base = fields_of(model)
    assert base != fields_of(model, settings=Settings(tenant="t"))
    assert base == fields_of(model, settings=Settings(copy_threads=3, promote_timeout_s=9.0))
    for offload in (
        offloading_config(cache=OffloadingCacheConfig(128, 4)),
        offloading_config(worker_kv_bytes_per_block=65536),
        offloading_config(replicated_layout=True),
        offloading_config(kv_cache_layout="BLHNC"),
    ):
        assert base != fields_of(model, offload=offload)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert base != fields_of(model)


def test_random_keys_get_a_private_pool(model: str, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(model, prefix_caching_hash_algo="xxhash")
    assert identity.hash_seed(config, b"one") != identity.hash_seed(config, b"two")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert identity.hash_seed(config, b"one") == identity.hash_seed(config, b"two")


def test_other_weights_at_the_same_path(model: str) -> None:
    base = fields_of(model)
    make_model(pathlib.Path(model), seed=1)
    other = dict(fields_of(model))
    assert other.pop("weights") != dict(base)["weights"]
    assert other.items() <= dict(base).items()


def test_one_changed_tensor_is_seen(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(512, 512) for i in range(20)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    base = fingerprint(str(tmp_path), False)
    assert base == fingerprint(str(tmp_path), False)
    for name in ("t0", "t7", "t19"):
        changed = tensors | {name: tensors[name] * 1.0001}
        save_file(changed, str(tmp_path / "model.safetensors"))
        assert fingerprint(str(tmp_path), False) != base
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert fingerprint(str(tmp_path), False) == base
    (tmp_path / "modeling.py").write_text("a = 1")
    code = fingerprint(str(tmp_path), True)
    (tmp_path / "modeling.py").write_text("a = 2")
    assert fingerprint(str(tmp_path), True) != code


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """As a user whom file modes bind."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(uid)


def refusal(path: str) -> str:
    with pytest.raises(Refusal) as caught:
        fingerprint(path, False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("header", "header is longer"),
        ("json", "line 1 column"),
        ("list", "attribute"),
        ("short", "shorter"),
        ("one byte short", "shorter"),
        ("empty", "short read"),
    ],
)
def test_broken_weights_are_refused(model: str, damage: str, reason: str) -> None:
    path = pathlib.Path(model) / "model.safetensors"
    data = path.read_bytes()
    broken = {
        "header": b"\xff" * 8 + data[8:],
        "json": data[:8] + b"?" + data[9:],
        "list": (2).to_bytes(8, "little") + b"[]",
        "short": data[: len(data) // 2],
        "one byte short": data[:-1],
        "empty": b"",
    }
    path.write_bytes(broken[damage])
    text = refusal(model)
    assert str(path) in text and reason in text and "--model" in text and "\n" not in text


def test_weights_without_permission_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's, which only root may enter
        os.chmod(folder, 0o755)
        model = pathlib.Path(folder) / "model"
        part = model / "part"
        part.mkdir(parents=True)
        torch.manual_seed(0)
        for path in (model / "a.safetensors", part / "b.safetensors"):
            save_file({"t": torch.randn(64)}, str(path))
            path.chmod(0o644)
        with not_root():
            whole = fingerprint(str(model), False)
        # What cannot be looked at is not left out: other weights there would look the same.
        for hidden in (part / "b.safetensors", part, model):
            mode = hidden.stat().st_mode
            hidden.chmod(0)
            with not_root():
                text = refusal(str(model))
            hidden.chmod(mode)
            assert f"kvist: {hidden}: Permission denied" in text and "--model" in text
        model.parent.chmod(0)
        with not_root(), pytest.raises(Refusal, match=r"model: Permission denied.*--model"):
            local_path(str(model), None)
        model.parent.chmod(0o755)
        with not_root():
            assert fingerprint(str(model), False) == whole


def test_models_that_are_not_there_are_refused(model: str) -> None:
    for path in pathlib.Path(model).iterdir():
        path.unlink()
    assert "has no weight files" in refusal(model) and "--model" in refusal(model)
    for path in ("/no/such/model", "./model", "~/model"):
        with pytest.raises(Refusal, match=f"{path}: No such file or directory.*--model"):
            local_path(path, None)
    for name in ("no-such-owner/no-such-model", "not/a/repository", "tiny llama"):
        with pytest.raises(Refusal, match=f"{name} is neither a local path.*--model"):
            local_path(name, None)


def test_other_weight_files(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(3 << 20))
    base = fingerprint(str(file), False)
    assert fingerprint(str(tmp_path), False) == base
    data = bytearray(3 << 20)
    data[-1] = 1
    file.write_bytes(data)
    assert fingerprint(str(file), False) != base
    with pytest.raises(Refusal, match="not on this machine"):
        local_path("s3://bucket/model", None)


def test_settings() -> None:
    assert Settings.parse({"spec_name": "x", "block_size": 512}) == Settings()
    assert Settings.parse({"verify": "always"}).verify
    for bad, words in (
        ({"verfy": "always"}, "Did you mean 'verify'"),
        ({"verify": True}, "'never' or 'always'"),
        ({"promote_timeout_s": -1}, "seconds"),
        ({"promote_timeout_s": "2"}, "seconds"),
        ({"detach_grace_s": True}, "seconds"),
        ({"copy_threads": 0}, "1 to 64"),
        ({"socket": 5}, "string"),
    ):
        with pytest.raises(Refusal, match=words):
            Settings.parse(bad)


def test_refusals(model: str) -> None:
    config = vllm_config(model)
    check_engine(config, offloading_config())
    with pytest.raises(Refusal, match="canonical_layout"):
        check_engine(config, offloading_config(canonical_layout=True))
    for change, words in (
        ({"nnodes": 2}, "several hosts"),
        ({"distributed_executor_backend": "ray"}, "another host"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
    ):
        values = {
            name: getattr(config.parallel_config, name)
            for name in ("nnodes", "distributed_executor_backend", "pipeline_parallel_size")
        }
        wrong = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(**values | change),
            attention_config=config.attention_config,
            lora_config=None,
        )
        with pytest.raises(Refusal, match=words):
            check_engine(wrong, offloading_config())
    with pytest.raises(Refusal, match="LoRA"):
        check_engine(vllm_config(model, enable_lora=True), offloading_config())
    with pytest.raises(Refusal, match="kv_connector_module_path"):
        current_construction()


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.33.1.dev3+g123", "0.31.0rc1"])
def test_known_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.0.0", "dev", ""])
def test_unknown_versions_are_refused(version: str) -> None:
    with pytest.raises(Refusal, match="0.30 to 0.33"):
        check_version(version)


def test_canonical_values_do_not_depend_on_the_process() -> None:
    class Odd:
        pass

    assert identity.digest({"b": 1, "a": {3, 1, 2}}) == identity.digest({"a": {2, 3, 1}, "b": 1})
    assert identity.digest(Odd()) == identity.digest(Odd())
    assert identity.digest([1, "1"]) != identity.digest(["1", 1])
    assert identity.digest({"a": None}) != identity.digest({})
    assert identity.digest(torch.float16) != identity.digest(torch.bfloat16)
