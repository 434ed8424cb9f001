"""Two ranks on one machine (gloo): the results of one process, or a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny import FAMILIES, _causal, save_family

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("mode", "rows"), [("ddp", 48), ("tp", 48), ("fsdp", 48), ("fsdp", 47), ("fsdp1", 48), ("zero", 48)]
)
def test_ranks_agree_with_one_process(mode: str, rows: int, built_kernel: Path, tmp_path: Path) -> None:
    """Also with rows of gate and up that two ranks cannot divide."""
    folder = save_family(
        replace(FAMILIES["llama"], build=_causal("Llama", mlp_bias=True, intermediate_size=rows)), tmp_path
    )
    done = torchrun("tests/training/ranks.py", mode, str(folder), str(built_kernel))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{mode}: ranks agree" in done.stdout


def test_the_fsdp2_example_agrees_with_one_process() -> None:
    done = torchrun("examples/fsdp2.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks against one process after 3 steps: equal" in done.stdout
