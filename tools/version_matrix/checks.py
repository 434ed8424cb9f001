"""What one environment of the matrix is asked: `python checks.py BUILD FOLDER` prints a result for each check."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

REPO = "layout-kernels/layout-kernels"
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PARENT = "model.layers.*"
FUSION = (("RMSNorm", f"{PARENT}.post_attention_layernorm"), ("MLP", f"{PARENT}.mlp"))


def layer(name: str) -> tuple[str, dict[str, Any]]:
    """A layer of the build, by a revision, so that no Hub is asked."""
    return f"{REPO}:{name}", {"revision": "v1", "trust_remote_code": True}


def expect(condition: Any, what: str) -> None:
    """Fail with what was expected."""
    if not condition:
        raise AssertionError(what)


class Checks:
    """The checks, in their order: a later one stands on what an earlier one made."""

    def __init__(self, build: Path, folder: Path) -> None:
        self.build, self.folder = build, folder

    def _logits(self, model: Any) -> Any:
        import torch

        with torch.no_grad():
            return model(torch.arange(18).reshape(2, 9)).logits

    def _equal(self, model: Any) -> None:
        # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
        off = float((self._logits(model) - self.expected).abs().max())
        expect(off <= 1e-5, f"logits are {off} off stock")

    def doctor(self) -> str:
        """The compiled variant loads, and the doctor is content."""
        import kernels

        self.kernel = kernels.get_local_kernel(self.build)
        text, healthy = import_module(f"{self.kernel.__name__}.models.doctor").diagnose()
        expect(healthy, text.rpartition("in the way: ")[2])
        return str(self.kernel.initialize("cpu")["rms_norm"].spec.name)

    def load(self) -> None:
        """Norms and MLPs under a norm key and a fusion key compute what stock does, and the report names them."""
        import torch
        import transformers as tf

        torch.manual_seed(0)
        stock = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY)).eval()
        stock.save_pretrained(self.folder / "stock")
        self.weights, self.expected = stock.state_dict(), self._logits(stock)
        mapping = {"RMSNorm": layer("CustomRMSNorm"), FUSION: layer("RMSNormMLP")}
        with self.kernel.kernel_loading():
            self.model = tf.AutoModelForCausalLM.from_pretrained(
                self.folder / "stock", use_kernels=True, kernel_config=tf.KernelConfig(mapping)
            )
        self._equal(self.model)
        rows = self.kernel.report(self.model).rows
        expect({row.layer for row in rows} == {"CustomRMSNorm", "RMSNormMLP"}, f"the report has {rows}")

    def save(self) -> None:
        """What is saved is the stock checkpoint, and the next stock load is stock."""
        import torch
        import transformers as tf

        self.model.save_pretrained(self.folder / "saved")
        again = tf.AutoModelForCausalLM.from_pretrained(self.folder / "saved")
        saved = again.state_dict()
        expect(list(saved) == list(self.weights), f"the names are {list(saved)}")
        expect(all(torch.equal(saved[name], self.weights[name]) for name in saved), "a saved tensor differs")
        expect(torch.equal(self._logits(again), self.expected), "a stock load afterwards is not stock")

    def apply(self) -> None:
        """The kernels on a live model, and `undo`."""
        import torch
        import transformers as tf

        model = tf.AutoModelForCausalLM.from_pretrained(self.folder / "stock")
        self.kernel.apply_default_kernels(model, "auto")
        self._equal(model)
        expect(self.kernel.report(model).rows, "the report is empty")
        self.kernel.undo(model)
        expect(torch.equal(self._logits(model), self.expected), "undo does not give the stock model")


NAMES = ("doctor", "load", "save", "apply")


def main(build: str, folder: str) -> int:
    """Run all checks and print one JSON object; the first that fails ends it."""
    checks, found = Checks(Path(build), Path(folder)), {}
    for name in NAMES:
        try:
            found[name] = getattr(checks, name)() or "passed"
        except Exception as error:  # noqa: BLE001 whatever it is, it is this version's result
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            break
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
