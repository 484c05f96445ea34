"""One-way streets: the core needs no framework, the framework packages need the core and never each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hsdp_fn

ROOT = Path(hsdp_fn.__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "torch_npu", "mindspore", "jax", "tensorflow")
#: What each package must not import, wherever in its code.
FORBIDDEN = {
    "hsdp_fn": (*FRAMEWORKS, "hsdp_fn_torch", "hsdp_fn_ms"),
    "hsdp_fn_torch": ("mindspore", "hsdp_fn_ms"),
    "hsdp_fn_ms": ("torch", "torch_npu", "hsdp_fn_torch"),
}
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FRAMEWORKS:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for framework in FRAMEWORKS:
    try:
        __import__(framework)
    except ImportError:
        continue
    raise SystemExit(f"{framework} isn't blocked")
"""
STEP = """
import numpy as np
import hsdp_fn as h
from hsdp_fn.reference import ReferenceBackend

mesh = h.MeshSpec.fsdp(2)
layout = h.plan_layout([h.ParamSpec("w", (3,), "float32")], mesh)
state = h.shard({"w": np.ones((2, 3), "float32")}, layout, backend=ReferenceBackend(mesh))
state = h.shard(h.unshard(state))
state, grads = h.grads(h.reduce_grads(state, {"w": np.ones((2, 3), "float32")}))
print(h.describe(h.apply_updates(state, grads)))
assert not set(FRAMEWORKS) & set(sys.modules), sys.modules.keys()
"""


def imports(source: str) -> Iterator[str]:
    """Top-level names of all absolute imports in the code, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.split(".")[0]


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_the_core_imports_and_steps_with_every_framework_blocked() -> None:
    code = f"FRAMEWORKS = {FRAMEWORKS}\n{BLOCKED}\n{STEP}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("HSDPState step 1")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_of_a_package_imports_what_it_must_not(package: str) -> None:
    assert files(package)
    found = {f"{path.relative_to(ROOT)}: {name}" for path in files(package) for name in imports(path.read_text())}
    assert [line for line in sorted(found) if line.split(": ")[1] in FORBIDDEN[package]] == []


def test_the_core_imports_nothing_but_the_standard_library_numpy_and_optree() -> None:
    assert len(files("hsdp_fn")) > 10
    names = {name for path in files("hsdp_fn") for name in imports(path.read_text())}
    assert names - set(sys.stdlib_module_names) <= {"numpy", "optree", "hsdp_fn"}
    assert {"numpy", "optree"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.distributed as dist",
        "from torch import nn",
        "def f():\n    import torch",
        "if TYPE_CHECKING:\n    from torch.nn import Module",
        "x = importlib.import_module('torch.fx')",
        "x = __import__('torch')",
    ],
)
def test_the_scan_finds_an_import_wherever_it_hides(source: str) -> None:
    assert "torch" in set(imports(source))


def test_the_scan_takes_no_name_of_the_package_itself_for_a_framework() -> None:
    assert list(imports("from .torch import x\nfrom . import jax\ntorch = 'torch'")) == []
