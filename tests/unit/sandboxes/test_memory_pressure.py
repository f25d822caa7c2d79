"""Free memory of the machine and of every limit above this process, for files of any kernel."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.errors import InfrastructureError
from etude.sandboxes.memory_pressure import MemoryGauge

MEMINFO = "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  5000 kB\n"
NO_LIMIT = str((1 << 63) - 4096)
STALLS = "some avg10=2.50 avg60=0.10 avg300=0.00 total=9\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1\n"


def gauge(folder: Path, files: Mapping[str, str]) -> MemoryGauge:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return MemoryGauge(proc=folder / "proc", cgroups=folder / "cgroup")


def test_this_machine_has_memory_and_this_process_takes_of_it() -> None:
    memory = MemoryGauge().read()
    assert memory.available_bytes > 1 << 20
    assert math.isnan(memory.stalled) or 0 <= memory.stalled <= 1


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    memory = gauge(tmp_path, {"proc/meminfo": MEMINFO, "proc/pressure/memory": STALLS}).read()
    assert memory.available_bytes == 5000 * 1024
    assert memory.stalled == 0.025


def test_a_kernel_without_pressure_says_nothing_of_it(tmp_path: Path) -> None:
    assert math.isnan(gauge(tmp_path, {"proc/meminfo": MEMINFO}).read().stalled)


def test_the_tightest_limit_above_counts_and_page_cache_is_room(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "cgroup/pod/memory.max": "900000\n",
        "cgroup/pod/memory.current": "500000\n",
        "cgroup/pod/memory.stat": "anon 1\nactive_file 5\ninactive_file 100000\n",
        "cgroup/pod/memory.pressure": STALLS.replace("2.50", "40.00"),
        "cgroup/pod/box/memory.max": "max\n",
        "cgroup/pod/box/memory.current": "400000\n",
    }
    memory = gauge(tmp_path, files).read()
    assert memory.available_bytes == 900_000 - 500_000 + 100_000
    assert memory.stalled == 0.4


def test_the_older_files_mean_the_same(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n5:cpu,memory:/box\n0::/\n",
        "cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "cgroup/memory/memory.usage_in_bytes": "1000000",
        "cgroup/memory/box/memory.limit_in_bytes": "70000",
        "cgroup/memory/box/memory.usage_in_bytes": "60000",
        "cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 5000\n",
    }
    assert gauge(tmp_path, files).read().available_bytes == 15_000


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/box",
        "cgroup/box/memory.max": "1000",
        "cgroup/box/memory.current": "1200",
    }
    assert gauge(tmp_path, files).read().available_bytes == 0


def test_a_machine_that_does_not_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="does not tell MemAvailable"):
        gauge(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}).read()
