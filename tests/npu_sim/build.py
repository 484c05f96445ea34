"""Compiles the simulator, at first use, into the libraries that the torch-npu wheel links.

The C++ sources include the headers that the wheel ships, so the compiler checks each signature against them. A symbol
that the wheel links and that no source defines becomes a function that aborts with its name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
#: The one library that holds everything; the others are empty and depend on it, which is enough for linking and for
#: the wheel's ``dlsym`` on their handles.
MAIN = "libascendcl.so"
ALIASES = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libhcomm.so",
)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread")
#: How CANN's plain C functions are called. What else is undefined in the wheel comes from torch, Python or libc.
_CANN = re.compile(r"(acl|Msprof|Hccl|Hcom)\w+|rt[A-Z]\w+")


def libraries() -> Path:
    """The folder with the libraries for the installed wheel, compiled now unless it was before. Takes some 15 seconds.

    Raises:
        RuntimeError: torch-npu isn't installed, or the compiler fails; the text has its output.
    """
    wheel = _wheel()
    folder = _cache() / _key(wheel)
    if not folder.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # this user's alone
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            made = Path(fresh, "libraries")
            made.mkdir()
            _compile(wheel, made)
            # Another process may have been faster; its result is the same.
            if not folder.exists():
                made.rename(folder)
    return folder


def generated_symbols(folder: Path) -> list[str]:
    """The functions in these libraries that only abort with their name."""
    return Path(folder, "missing.txt").read_text().split()


def _wheel() -> Path:
    found = importlib.util.find_spec("torch_npu")  # doesn't import it
    if found is None or found.origin is None:
        raise RuntimeError("the simulator needs the wheel: pip install --no-deps torch-npu==2.13.0")
    return Path(found.origin).parent


def _cache() -> Path:
    return Path(os.environ.get("NPU_SIM_CACHE") or Path(tempfile.gettempdir(), f"npu-sim-{os.getuid()}"))


def _key(wheel: Path) -> str:
    digest = hashlib.sha256(f"{importlib.metadata.version('torch-npu')} {wheel}".encode())
    for path in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(wheel: Path, folder: Path) -> None:
    headers = wheel / "include"
    objects = [folder / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))]
    include = [f"-isystem{headers}", f"-isystem{headers / 'third_party/acl/inc'}"]
    compile_only = [flag for flag in FLAGS if flag != "-shared"]
    for item in objects:
        _run("g++", *compile_only, *include, "-c", SOURCES / f"{item.stem}.cpp", "-o", item)

    missing = sorted(_linked_by(wheel) - _symbols("--defined-only", *objects))
    stubs = folder / "missing.cpp"
    stubs.write_text(
        'extern "C" void npu_sim_missing(const char* name);\n'
        + "".join(f'extern "C" void {name}() {{ npu_sim_missing("{name}"); }}\n' for name in missing)
    )
    _run("g++", *FLAGS, f"-Wl,-soname,{MAIN}", "-o", folder / MAIN, stubs, *objects, "-lrt", "-ldl")
    (folder / "missing.txt").write_text("\n".join(missing))

    empty = folder / "empty.cpp"
    empty.touch()
    for name in ALIASES:
        depend = ("-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", folder / MAIN)
        _run("g++", *FLAGS, f"-Wl,-soname,{name}", "-o", folder / name, empty, *depend)
    for leftover in (*objects, stubs, empty):
        leftover.unlink()


def _linked_by(wheel: Path) -> set[str]:
    """CANN's functions without which the wheel's libraries can't be loaded."""
    found = _symbols("--undefined-only", *wheel.glob("lib/lib*.so"), *wheel.glob("_C*.so"))
    return {name for name in found if _CANN.fullmatch(name)}


def _symbols(which: str, *files: Path) -> set[str]:
    found = set()
    for file in files:
        dynamic = ["-D"] if file.suffix == ".so" else []
        for line in _run("nm", *dynamic, which, "--format=posix", file).splitlines():
            name, kind = line.split()[:2]
            if kind not in "wv":  # a weak reference may stay undefined
                found.add(name.split("@")[0])
    return found


def _run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(libraries())
