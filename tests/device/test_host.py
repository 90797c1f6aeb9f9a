"""Host memory, read from made-up /proc and control-group trees."""

from __future__ import annotations

import pytest

from autobatch.core.units import GiB, MiB
from autobatch.device.host import count_oom_kills, cpu_name, has_gpu_driver, host_memory

MEMINFO = f"MemTotal:  {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable:  {8 * MiB} kB\n"
"""16 GiB in all, 8 GiB available."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # No control groups, and not even procfs.
        ({}, (16 * GiB, 8 * GiB)),
        ({"proc/meminfo": ""}, (None, None)),
        # The page cache that the kernel takes back is available.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "cg/memory.max": f"{4 * GiB}\n",
                "cg/memory.current": f"{3 * GiB}\n",
                "cg/memory.stat": f"anon 5\ninactive_file {GiB}\n",
            },
            (4 * GiB, 2 * GiB),
        ),
        # No limit of its own, one above it; the machine has less available than the group has left.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/memory.max": "max\n",
                "cg/a/b/memory.current": "1\n",
                "cg/a/memory.max": f"{12 * GiB}\n",
                "cg/a/memory.current": f"{GiB}\n",
            },
            (12 * GiB, 8 * GiB),
        ),
        # Over its limit.
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": "1000\n", "cg/memory.current": "2000\n"},
            (1000, 0),
        ),
    ],
)
def test_the_lower_of_the_machine_and_its_control_groups(tmp_path, files, expected):
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory(proc=tmp_path / "proc", cgroups=tmp_path / "cg")[:2] == expected


def test_what_linux_tells_of_its_processor_its_drivers_and_what_it_killed(tmp_path):
    assert cpu_name(proc=tmp_path)
    assert count_oom_kills(proc=tmp_path, cgroups=tmp_path) == 0
    assert not has_gpu_driver(devices=tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Made-up 9000 @ 3: GHz\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "vmstat").write_text("nr_free 7\noom_kill 5\n")
    (tmp_path / "kfd").touch()
    assert cpu_name(proc=tmp_path) == "Made-up 9000 @ 3: GHz"
    assert count_oom_kills(proc=tmp_path, cgroups=tmp_path) == 7
    assert has_gpu_driver(devices=tmp_path)
