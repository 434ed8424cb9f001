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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints by the rows of gate and up; 47 are rows that two ranks cannot divide."""
    found = {}
    for rows in (48, 47):
        family = replace(FAMILIES["llama"], build=_causal("Llama", mlp_bias=True, intermediate_size=rows))
        found[rows] = save_family(family, tmp_path_factory.mktemp(f"rows{rows}"))
    return found


CASES = [("ddp", 48), ("tp", 48), ("fsdp", 48), ("fsdp", 47), ("fsdp1", 48), ("zero", 48)]


@pytest.fixture(scope="module")
def done(built_kernel: Path, folders: dict[int, Path]) -> subprocess.CompletedProcess[str]:
    """One start of the two ranks, which takes longer than what they compute."""
    return torchrun("tests/training/ranks.py", str(built_kernel), *(f"{mode}={folders[rows]}" for mode, rows in CASES))


@pytest.mark.parametrize(("mode", "rows"), CASES)
def test_ranks_agree_with_one_process(
    mode: str, rows: int, done: subprocess.CompletedProcess[str], folders: dict[int, Path]
) -> None:
    assert f"{mode}={folders[rows]}: ranks agree" in done.stdout, done.stderr[-3000:]


def test_the_fsdp2_example_agrees_with_one_process() -> None:
    done = torchrun("examples/fsdp2.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks against one process after 3 steps: equal" in done.stdout
