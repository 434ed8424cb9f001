"""The programs in the README run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.loads import REPO
from tests.support.tiny import FAMILIES, save_family

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKED = re.findall(r"<!-- run by tests/test_readme.py -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_user_s_and_the_framework_s_program_are_marked() -> None:
    assert [("k.plan(path)" in code, "apply_kernel" in code) for code in MARKED] == [(True, False), (False, True)]


@pytest.mark.parametrize("code", MARKED, ids=["plan", "framework"])
def test_a_program_of_the_readme_runs(code: str, built_kernel: Path, tmp_path: Path) -> None:
    save_family(FAMILIES["llama"], tmp_path / "checkpoint")
    # No Hub here: a local folder for the checkpoint and for the kernel, which has no version to ask for.
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "checkpoint").replace("version=1", 'revision="v1"')
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "torch-ext"), "LOCAL_KERNELS": f"{REPO}={built_kernel}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RMSNormMLP on cpu" in done.stdout
