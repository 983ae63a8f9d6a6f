"""What tests/bench/peers stands on: its workload on a real kvistd, its checks, its figures."""

import ctypes
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "peer")]

import client  # noqa: E402
import figures  # noqa: E402
import stores  # noqa: E402

SHAPE = (64 << 10, 64, 16)  # block bytes, blocks, blocks a call


@pytest.fixture
def kvist_store(tmp_path: pathlib.Path) -> Iterator[stores.Store]:
    store = stores.Kvist(tmp_path, *SHAPE)
    store.open()
    client.randomize(store)
    yield store
    store.close()


def test_turns_on_kvist(kvist_store: stores.Store) -> None:
    for number in range(kvist_store.fill_turns + 1):  # more than the arena has room for
        times = client.turn(kvist_store, number)
        assert set(times) == {"put", "get", "find"}
        assert min(times.values()) > 0


@pytest.mark.parametrize("at", [0, SHAPE[0] // 2, SHAPE[0] * SHAPE[1] - 1])
def test_one_wrong_byte_is_found(tmp_path: pathlib.Path, at: int) -> None:
    class Liar(stores.Memcpy):
        def get(self, keys: None) -> None:
            super().get(keys)
            byte = ctypes.c_ubyte.from_address(self.target + at)
            byte.value ^= 1

    store = Liar(tmp_path, *SHAPE)
    store.open()
    client.randomize(store)
    with pytest.raises(client.WrongBytes, match=f"block {at // SHAPE[0]} "):
        client.turn(store, 0)


def test_blocks_of_an_earlier_turn_are_wrong(tmp_path: pathlib.Path) -> None:
    class Stale(stores.Memcpy):
        is_full = False

        def put(self, keys: None) -> None:
            if not self.is_full:
                super().put(keys)
            self.is_full = True

    store = Stale(tmp_path, *SHAPE)
    store.open()
    client.randomize(store)
    client.turn(store, 0)
    with pytest.raises(client.WrongBytes):
        client.turn(store, 1)


def test_intervals() -> None:
    mean, low, high = figures.interval([1.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert low == pytest.approx(2.0 / math.exp(12.71 * math.log(2)))
    assert high == pytest.approx(2.0 * math.exp(12.71 * math.log(2)))
    mean, low, high = figures.interval([3.0] * 7)
    assert (mean, low, high) == pytest.approx((3.0, 3.0, 3.0))
    mean, low, high = figures.interval([1.0, 2.0, 4.0, 8.0, 16.0])
    assert math.log(high / low) == pytest.approx(2 * 2.776 * math.log(2) * math.sqrt(2.5 / 5))


def made(size: int, operation: str, **rounds: list[float]) -> figures.Figures:
    all_figures = figures.Figures()
    for name, values in rounds.items():
        for value in values:
            all_figures.add(size, operation, name, value)
    return all_figures


def test_kvist_is_judged_beside_the_best() -> None:
    of_gets = made(1 << 19, "get", kvist=[12.0] * 3, memcpy=[99.0] * 3, slow=[1.0] * 3, fast=[10.0] * 3)
    (measured, ratio), = of_gets.results()
    assert (measured.row.name, measured.row.limit, measured.mark()) == ("peers_get_512k", "fast", "ok")
    assert ratio == pytest.approx((1.2, 1.2, 1.2))
    of_times = made(1 << 19, "find", kvist=[200.0] * 3, slow=[9000.0] * 3, fast=[500.0] * 3)
    (measured, ratio), = of_times.results()
    assert (measured.row.limit, measured.mark()) == ("fast", "miss")
    assert ratio[0] == pytest.approx(0.4)
    of_times.drop("fast")
    assert of_times.results()[0][0].row.limit == "slow"
    assert any("kvist" in line and "200" in line for line in of_times.table())
    json.dumps(of_times.to_json())


def test_nothing_to_compare_with() -> None:
    assert made(1 << 19, "get", kvist=[12.0], memcpy=[12.0]).results() == []


def test_help_and_refusals() -> None:
    assert "--rounds" in subprocess.run(
        [BENCH / "peers", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for wrong in (["--only", "other"], ["--rounds", "1"], ["--sizes", "3000"]):
        assert subprocess.run([BENCH / "peers", *wrong], capture_output=True).returncode == 2
