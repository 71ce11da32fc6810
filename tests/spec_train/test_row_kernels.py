"""The kernels of losses, run by Triton's interpreter, and built for a GPU; no GPU is needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

COMPILING = """
import itertools
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spec_train.losses import row_kernels as module

sums = ("totals", "masses", "entropies", "first", "second", "figures", "sums")
types = dict.fromkeys(("x", "z", "biases"), "*bf16") | dict.fromkeys(sums, "*fp32")
types |= dict.fromkeys(("teacher_of", "bias_of", "labels", "best", "ends"), "*i64")
types |= dict.fromkeys(("rows", "width", "steps"), "i32")
types |= dict.fromkeys(("scale", "decay", "slope", "cap"), "fp32")

def built(kernel, **constants):
    constants["BLOCK"] = module.BLOCK
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": module.WARPS}
    return build(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]

for form, hard in itertools.product(module.FORMS.values(), (False, True)):
    flags = dict.fromkeys(("INDEXED", "BIASED", "SHARED", "MASS", "CAPPED"), hard)
    assert built(module._row_loss, FORM=form, HARD=hard, **flags)
assert built(module._row_sums) and built(module._group_sums)
"""


def run(*words: str, **settings: str) -> None:
    """Run Python; Triton reads its settings when it is imported, so never in this process."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = os.environ | {"PYTHONPATH": paths} | settings
    done = subprocess.run(
        [sys.executable, *words], env=given, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_interpreter_computes_the_formulas() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0")
    run(*words, "tests/spec_train/row_kernel_cases.py", TRITON_INTERPRET="1")


def test_every_form_compiles_for_an_h100(tmp_path: Path) -> None:
    """Triton and its assembler need no GPU for that."""
    run("-c", COMPILING, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
