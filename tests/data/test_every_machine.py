"""Data and the order of samples are the same to the last bit whatever the processor, its kernels and the threads.

`python -m tests.data.test_every_machine` prints their digests; the tests compare those of this process with those of two
processes under the settings of other machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("mmt_small", "dlrm_small", "candle_uno_small")
OTHERS = (("digits", "digits", "data.standardize=true"), ("residual_lstm_small", "translation"), ("char_gpt_small", "text"))

AVX2 = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
OLDEST = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
}
MACHINES = {"avx2": AVX2, "oldest": OLDEST}


@cache
def digests() -> dict[str, str]:
    """A digest of every data set, of an order of samples and of initial weights, by name."""
    from gpp.data.sampler import minibatch
    from tests.support.conf import model_named, option
    from tests.support.inprocess import default_dtype

    found: dict[str, Any] = {"order": hashlib.sha256(str(minibatch(3, 48, 1024, 7)).encode())}

    def note(key: str, tensors: dict[str, Any]) -> None:
        found[key] = hashlib.sha256()
        for name in sorted(tensors):
            found[key].update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())

    for name, kind, *overrides in (*((name, "synthetic") for name in MODELS), *OTHERS):
        model, data = model_named(name), option("data", kind, *overrides)
        for split in ("train", "test"):
            samples = data.load(split, model, seed=1, dtype="float32")
            note(f"{name} {kind} {split}", samples.fetch(range(len(samples))))
    with default_dtype("float64"):
        for name in MODELS:
            torch.manual_seed(0)
            note(f"{name} weights", model_named(name).build().state_dict())
    return {key: value.hexdigest() for key, value in found.items()}


def digests_under(settings: dict[str, str]) -> dict[str, str]:
    """The same of a process with these environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.test_every_machine"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_data_are_those_of_any_other_machine(machine: str) -> None:
    here, found = digests(), digests_under(MACHINES[machine])
    assert len(here) == 1 + 2 * (len(MODELS) + len(OTHERS)) + len(MODELS)
    differ = {key for key in here | found if here.get(key) != found.get(key)}
    # Without fused multiply-add, torch rounds the weights that it draws otherwise. The controller draws them once for all workers.
    fused = machine != "oldest" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    assert differ <= (set() if fused else {f"{name} weights" for name in MODELS})


if __name__ == "__main__":
    print(json.dumps(digests()))
