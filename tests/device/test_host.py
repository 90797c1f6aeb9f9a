"""Host memory, read from made-up /proc and control-group trees."""

from __future__ import annotations

import pytest

from autobatch.core.units import GiB, MiB
from autobatch.device.host import (
    count_oom_kills,
    cpu_name,
    has_gpu_driver,
    host_memory,
)


@pytest.fixture
def tree(tmp_path):
    """Writes files below a directory that stands for the file system."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory(proc=tmp_path / "proc", cgroups=tmp_path / "cg")

    return write


MEMINFO = {"proc/meminfo": f"MemTotal:  {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable:  {8 * MiB} kB\n"}
"""16 GiB in all, 8 GiB available."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # No control groups, and neither these nor procfs.
        ({}, (16 * GiB, 8 * GiB)),
        ({"proc/meminfo": ""}, (None, None)),
        # In the group's own namespace: the root is the group.
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": f"{4 * GiB}\n", "cg/memory.current": f"{GiB}\n"},
            (4 * GiB, 3 * GiB),
        ),
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
def test_the_lower_of_the_machine_and_its_control_groups(tree, files, expected):
    assert tree({**MEMINFO, **files})[:2] == expected


def test_cpu_name(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Made-up 9000 @ 3: GHz\n")
    assert cpu_name(proc=tmp_path) == "Made-up 9000 @ 3: GHz"
    assert cpu_name(proc=tmp_path / "none")


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, 0),
        ({"cg/memory.events": "low 0\noom 3\noom_kill 2\n", "proc/vmstat": "nr_free 7\noom_kill 5\n"}, 7),
        ({"cg/memory.events": "oom_kill many\n", "proc/vmstat": "oom_kill 5\n"}, 5),
    ],
)
def test_killed_processes_are_counted_in_the_control_group_and_on_the_machine(tree, tmp_path, files, kills):
    tree(files)
    assert count_oom_kills(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == kills


def test_the_driver_of_a_gpu_is_seen_by_its_device_file(tmp_path) -> None:
    (tmp_path / "null").touch()
    assert not has_gpu_driver(devices=tmp_path)
    (tmp_path / "kfd").touch()
    assert has_gpu_driver(devices=tmp_path)
