"""Build the stub libraries of the fake CUDA device from the symbol tables of the installed CUDA wheels.

The part ``stubs`` of check.py builds .cuda/fake/*.so. golden/imports.txt lists every function that the wheels import
from the libraries replaced here. One that stubs/*.c has not written does nothing and reports success. A function that
the list lacks ends the build with its name and the file that imports it. What the real library exports and nothing
imports reports its name when it is called, and an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUBS = HERE / "stubs"
GOLDEN = HERE / "golden" / "imports.txt"
OUTPUT = HERE.parent.parent / ".cuda" / "fake"
SITE = Path(sysconfig.get_paths()["purelib"])
IMPORTERS = ("torch", "vllm", "torchvision", "triton", "nvidia", "deepspeed")  # packages whose files are read
PRODUCT = re.compile(r"gem[mv]", re.IGNORECASE)  # cublasLtMatmul is in stubs/cublaslt.c


@dataclass
class Library:
    """A library that is replaced: its file, the sources in stubs/, and the error of what has no stub."""

    name: str  # as other libraries ask for it
    sources: tuple[str, ...]
    missing: int  # "not supported", in the codes of this library
    exports: set[str] = field(default_factory=set)  # of the real one
    version: str = ""  # of its symbols
    imports: dict[str, str] = field(default_factory=dict)  # function -> a file that imports it


def libraries() -> list[Library]:
    """Return the replaced libraries with the names that the installed wheels give them, in the order of preloading."""
    found = []
    real = {
        "libcudart.so.*": (("device.c", "runtime.c"), 801),
        "libnccl.so.*": (("nccl.c",), 3),
        "libcublasLt.so.*": (("cublaslt.c",), 15),
        "libcublas.so.*": (("cublas.c",), 15),
    }
    for pattern, (sources, missing) in real.items():
        (path,) = [x for x in SITE.glob(f"nvidia/**/lib/{pattern}") if re.fullmatch(r"\d+", x.name.rsplit(".", 1)[1])]
        library = Library(path.name, sources, missing)
        for name, version in symbols(path, "--defined-only"):
            library.exports.add(name)
            library.version = version or library.version
        found.append(library)
    header = next(SITE.glob("nvidia/**/include/cuda.h")).read_text()
    driver = Library("libcuda.so.1", ("driver.c",), 801)
    newer = re.findall(r"#define\s+cu\w+\s+(cu\w+)", header)  # a function's name and its latest version
    driver.exports = {*re.findall(r"\b(cu[A-Z]\w+)\s*\(", header), *newer}
    found.insert(1, driver)
    bindings = next(SITE.glob("vllm/third_party/pynvml.py")).read_text()
    nvml = Library("libnvidia-ml.so.1", ("nvml.c",), 3)
    nvml.exports = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', bindings))
    return [*found, nvml]


def symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """Return (function, version) of the dynamic symbols of a file; ``which``: --defined-only or --undefined-only."""
    done = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True)
    found = []
    for line in done.stdout.splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind in "TWUiw" and name != version.lstrip("@"):
            found.append((name, version.lstrip("@")))
    return found


def read_imports(replaced: list[Library]) -> None:
    """Fill ``imports``: by the version of a symbol, or by the name where it has none."""
    by_version = {library.version: library for library in replaced if library.version}
    own = {library.name for library in replaced}
    for package in IMPORTERS:
        for path in sorted((SITE / package).rglob("*.so*")):
            if path.name in own or path.is_symlink():
                continue
            for name, version in symbols(path, "--undefined-only"):
                library = by_version.get(version)
                if library is None and not version:
                    library = next((x for x in replaced if name in x.exports), None)
                if library is not None:
                    library.imports.setdefault(name, str(path.relative_to(SITE)))


def listed() -> dict[str, set[str]]:
    """Return the functions of golden/imports.txt by library."""
    functions: dict[str, set[str]] = {}
    for line in GOLDEN.read_text().splitlines():
        library, name = line.split()
        functions.setdefault(library, set()).add(name)
    return functions


def changes(replaced: list[Library]) -> list[str]:
    """Compare the imports with golden/imports.txt: a line per function that is new or gone."""
    known = listed()
    lines = []
    for library in replaced:
        old = known.get(library.name, set())
        for name in sorted(library.imports.keys() - old):
            lines.append(
                f"{library.imports[name]} imports {name} of {library.name}, which the fake device does not have: "
                f"write it in {' or '.join('tests/fake_cuda/stubs/' + x for x in library.sources)}, or add it to "
                f"tests/fake_cuda/golden/imports.txt if success without doing anything is right"
            )
        gone = sorted(old - library.imports.keys())
        lines += [f"no wheel imports {name} of {library.name} any more" for name in gone]
    return lines


def compile_library(library: Library, folder: Path) -> None:
    """Compile one stub library: what stubs/*.c has, what does nothing, and what reports its name."""
    include = next(SITE.glob("nvidia/**/include/cuda_runtime_api.h")).parent
    flags = ["gcc", "-O1", "-fPIC", "-Wall", "-Werror", "-I", str(STUBS), "-I", str(include)]
    objects = []
    for source in library.sources:
        objects.append(folder / f"{source}.o")
        subprocess.run([*flags, "-c", str(STUBS / source), "-o", str(objects[-1])], check=True)
    written = set()
    for path in objects:
        done = subprocess.run(["nm", "--defined-only", str(path)], capture_output=True, text=True, check=True)
        written |= {line.split()[-1] for line in done.stdout.splitlines() if " T " in line}
    lines = ['#include "fake.h"']
    for name in sorted(library.imports.keys() - written):
        counted = "fake_add(PRODUCTS, 1);" if PRODUCT.search(name) and "blas" in library.name else ""
        lines.append(f"long {name}() {{ {counted} return 0; }}")
    for name in sorted(library.exports - library.imports.keys() - written):
        lines.append(f'long {name}() {{ return fake_missing("{name}", {library.missing}); }}')
    rest = folder / f"{library.name}.rest.c"
    rest.write_text("\n".join(lines) + "\n")
    script = folder / f"{library.name}.map"
    script.write_text(f"{library.version} {{ global: *; }};\n" if library.version else "{ global: *; };\n")
    line = [*flags, "-fno-builtin", "-shared", "-o", str(folder / library.name), *map(str, objects), str(rest)]
    if library.sources[0] != "device.c":
        line += [str(folder / cudart_name())]
    linker = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}", "-lpthread", "-ldl"]
    subprocess.run([*line, *linker], check=True)


def cudart_name() -> str:
    """Return the name of the runtime's library, which holds the card and its counters."""
    (path,) = [x for x in SITE.glob("nvidia/**/lib/libcudart.so.*") if re.fullmatch(r"\d+", x.name.rsplit(".", 1)[1])]
    return path.name


def build(write_golden: bool = False) -> list[str]:
    """Build all libraries into ``OUTPUT``; return what differs from golden/imports.txt. New functions are an error."""
    replaced = libraries()
    read_imports(replaced)
    if write_golden:
        lines = [f"{library.name} {name}" for library in replaced for name in sorted(library.imports)]
        GOLDEN.write_text("\n".join(lines) + "\n")
    differences = changes(replaced)
    if not any(" imports " in line for line in differences):
        fresh = OUTPUT.with_name("fake.new")  # processes may be using the libraries that are there
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        OUTPUT.mkdir(exist_ok=True)
        for library in replaced:
            compile_library(library, fresh)
        for library in replaced:
            os.replace(fresh / library.name, OUTPUT / library.name)
        shutil.rmtree(fresh)
    return differences
