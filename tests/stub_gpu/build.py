"""Compile the stub libraries for one build of torch.

Torch's libraries name the symbols that they need. What ``src`` defines is compiled. Every other symbol
becomes a function that returns a constant, so that the loader is content. Most are never called.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NOT_SUPPORTED = 801  # cudaErrorNotSupported, and the driver's number for the same


@dataclass(frozen=True)
class Library:
    """One library that torch is linked with."""

    name: str
    source: str | None = None
    """The file in ``src``; None if every function returns the constant."""
    returns: int = 0
    """What a function that no source defines returns."""
    unversioned: str | None = None
    """A pattern of the symbols that carry no version."""


LIBRARIES = (
    Library("cudart", "cudart.cpp", NOT_SUPPORTED),
    Library("cuda", "driver.cpp", NOT_SUPPORTED, r"cu[A-Z](?!ile)"),
    Library("cublas", "cublas.cpp"),
    Library("cublasLt", "cublaslt.cpp"),
    Library("cudnn", "cudnn.cpp"),
    Library("nccl", "nccl.cpp", 0, r"p?nccl"),
    Library("cusparse", "others.cpp"),
    Library("cusolver", "others.cpp"),
    Library("cufft", "others.cpp"),
    Library("nvrtc", "others.cpp", 1),
    Library("curand", None, 1),
    Library("cusparseLt", None, 10, r"cusparseLt"),
    Library("cufile", None, 1, r"cuFile"),
    Library("cupti", None, 15),
    Library("nvshmem_host", None, 1, r"nvshmem"),
    Library("nvidia-ml", "nvml.cpp"),
)
"""All that torch is linked with or opens; the others use the first."""
# Torch asks for entries of the driver by name, while it runs.
DRIVER_ENTRY = re.compile(
    rb"\0(cu(?:Ctx|Dev|Mem|Get|Green|Multi|Stream|Func|Launch|Link|Module|Occ|Pointer|Tensor|Init|Driver|Library"
    rb"|Kernel|Event|Logs)[A-Za-z0-9_]+)(?=\0)"
)
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-Wl,-rpath,$ORIGIN", "-Wl,-z,lazy"]


@dataclass(frozen=True)
class Needs:
    """What torch's libraries ask for."""

    sonames: frozenset[str]
    symbols: frozenset[str]
    """With ``@VERSION`` where they carry one."""
    driver_entries: frozenset[str]


def build(torch_libraries: Path, include: Path, out: Path) -> None:
    """Compile all stub libraries into a new folder."""
    out.mkdir()
    needs = _read_needs(torch_libraries)
    _compile([SOURCES / "core.cpp"], out / "libstubgpu.so", include)
    shared = [f"-L{out}", "-lstubgpu"]
    runtime, *rest = LIBRARIES
    _build_library(runtime, needs, include, out, shared)
    shared.append(f"-l:{_soname(runtime, needs)}")
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda library: _build_library(library, needs, include, out, shared), rest)]


def _read_needs(torch_libraries: Path) -> Needs:
    sonames: set[str] = set()
    symbols: set[str] = set()
    entries: set[str] = set()
    for file in sorted(torch_libraries.glob("*.so")):
        undefined = _output("nm", "-D", "--undefined-only", file)
        symbols.update(line.split()[-1].replace("@@", "@") for line in undefined.splitlines())
        sonames.update(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^\]]*)\]", _output("readelf", "-d", file)))
        if file.name in {"libc10_cuda.so", "libtorch_python.so", "libcaffe2_nvrtc.so"}:
            entries.update(match.decode() for match in DRIVER_ENTRY.findall(file.read_bytes()))
    return Needs(frozenset(sonames), frozenset(symbols), frozenset(entries))


def _soname(library: Library, needs: Needs) -> str:
    prefix = f"lib{library.name}.so."
    return next((name for name in needs.sonames if name.startswith(prefix)), f"{prefix}1")


def _build_library(library: Library, needs: Needs, include: Path, out: Path, shared: list[str]) -> None:
    soname = _soname(library, needs)
    version = "NVSHMEM" if library.name == "nvshmem_host" else soname
    versioned = {symbol.split("@")[0] for symbol in needs.symbols if symbol.endswith("@" + version)}
    wanted = set(versioned)
    if library.unversioned:
        plain = {symbol for symbol in needs.symbols if "@" not in symbol}
        wanted |= {symbol for symbol in plain if re.match(library.unversioned, symbol)}
    if library.name == "cuda":
        wanted |= needs.driver_entries
    sources = []
    if library.source:
        sources.append(SOURCES / library.source)
        wanted -= _defined(library, include)
    constants = out / f"{library.name}-constants.cpp"
    constants.write_text(_constants(sorted(wanted), library.returns))
    options = [_macro(library), f"-Wl,-soname,{soname}", *shared]
    if versioned:
        script = out / f"{library.name}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script,{script}")
    _compile([*sources, constants], out / soname, include, *options)


def _macro(library: Library) -> str:
    return f"-DLIBRARY_{library.name.replace('-', '_')}"


def _defined(library: Library, include: Path) -> set[str]:
    """Return the functions that the source of a library exports, from its preprocessed text."""
    source = SOURCES / str(library.source)
    text = _output("g++", "-E", "-P", _macro(library), "-isystem", include, "-I", SOURCES, source)
    return set(re.findall(r'visibility\("default"\)\)\)\s+[\w:* ]+?[ *](\w+)\s*\(', text))


def _constants(names: list[str], value: int) -> str:
    """Write C++ in which each name is a function that returns the value."""
    lines = ['extern "C" void stub_trace(const char*);']
    for name in names:
        lines.append(f'extern "C" int {name}() {{ stub_trace("{name} (constant)"); return {value}; }}')
    return "\n".join(lines) + "\n"


def _compile(sources: list[Path], out: Path, include: Path, *options: str) -> None:
    _output("g++", *FLAGS, "-isystem", include, "-I", SOURCES, *sources, "-o", out, *options)


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout
