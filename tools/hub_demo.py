"""`make hub-demo`: the whole Hub path with the unmodified clients, against a Hub on loopback, over HTTP.

Publishes this tree, looks at it, locks and downloads it, loads a small model by name, the same without a network,
damages a file, finds that and mends it. Each step prints its command, how long it took and what came of it; the exit
status is 1 as soon as one is not as it should be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.hub import Hub
from tests.support.hub_client import REPO, ROOT, Client
from tools.project import read_project

EXAMPLE = ROOT / "examples" / "locked-app"
MODEL = """
import sys, torch, kernels
from transformers import AutoModelForCausalLM, KernelConfig, Qwen3Config, Qwen3ForCausalLM
from pathlib import Path
folder, repo = sys.argv[1:]
if not Path(folder).is_dir():
    Qwen3ForCausalLM(Qwen3Config(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
                                 num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
options = {"version": 1, "trust_remote_code": True}
fusion = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
tokens = torch.arange(3, 12)[None]
stock = AutoModelForCausalLM.from_pretrained(folder)
k = kernels.get_kernel(repo, **options)
for key, layer in (("RMSNorm", "CustomRMSNorm"), (fusion, "RMSNormMLP")):
    with k.kernel_loading():
        model = AutoModelForCausalLM.from_pretrained(
            folder, use_kernels=True, kernel_config=KernelConfig({key: (f"{repo}:{layer}", options)}))
    with torch.no_grad():
        error = (model(tokens).logits - stock(tokens).logits).abs().max().item()
    count = sum(row.layer == layer for row in k.report(model).rows)
    print(f"{layer}: {count} modules, largest difference of the logits {error:.1e}")
    if not count or error > 1e-5:
        sys.exit("not what the stock model computes")
"""
VERIFY = f"""
import sys, kernels
k = kernels.get_kernel({REPO!r}, version=1, trust_remote_code=True)
found = k.verify({REPO!r}, "v1")
print(found)
sys.exit(0 if found.valid else 1)
"""


class Demo:
    """The steps; each is a command of a client, printed with its result.

    Args:
        hub: the Hub on loopback.
        folder: where the maintainer, the user and their files live.
    """

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.maintainer = Client(hub, folder / "maintainer")
        self.user = Client(hub, folder / "user")
        self.branch = f"v{read_project().version}"

    def step(
        self, client: Client, title: str, *command: str, offline: bool = False, status: int = 0, lines: int = 4
    ) -> str:
        """Run one command of a client; stop the demo where it ends otherwise than with `status`."""
        shown = " ".join(
            Path(word).name if word.startswith("/") else word.strip().partition("\n")[0] for word in command[:7]
        )
        print(f"\n== {title}\n   {'HF_HUB_OFFLINE=1 ' if offline else ''}{shown}", flush=True)
        begin = time.monotonic()
        token = {"HF_TOKEN": self.hub.token} if client is self.maintainer else {}
        result = client.run(*command, offline=offline, **token)
        for line in result.stdout.rstrip().splitlines()[-lines:]:
            print(f"   | {line}")
        print(f"   {time.monotonic() - begin:.1f} s, exit status {result.returncode}")
        if result.returncode != status:
            print(result.stderr, file=sys.stderr)
            raise SystemExit(f"hub-demo: {title!r} ended with {result.returncode}, not {status}")
        return result.stdout

    def run(self) -> None:
        """All steps."""
        self.publish()
        project = self.lock_and_download()
        self.load(project)
        self.damage_and_mend()

    def publish(self) -> None:
        """The maintainer's command; a second upload has nothing to do."""
        publish = (
            sys.executable,
            "-m",
            "tools.publish",
            REPO,
            "--allow-dirty",
            "--output",
            str(self.folder / "build"),
        )
        self.step(self.maintainer, "publish: build, check, prove, upload", *publish, lines=40)
        writes = self.hub.count(r"POST .*/commit/")
        upload = (sys.executable, "-m", "tests.support.publish_prebuilt", str(self.folder / "build"))
        self.step(self.maintainer, "publish again", *upload, self.branch.removeprefix("v"))
        if self.hub.count(r"POST .*/commit/") != writes:
            raise SystemExit("hub-demo: the second publication uploaded something")

    def lock_and_download(self) -> Path:
        """What a project that locks its kernels does; returns its folder."""
        project = Path(shutil.copytree(EXAMPLE, self.folder / "locked-app"))
        kernels = str(Path(sys.executable).with_name("kernels"))
        self.step(self.user, "what is published", kernels, "versions", REPO, lines=8)
        self.step(self.user, "described", kernels, "info", REPO, lines=10)
        self.step(self.user, "lock", kernels, "lock", str(project))
        print("   | " + " ".join((project / "kernels.lock").read_text().split()))
        self.step(self.user, "download the locked commit", kernels, "download", str(project))
        return project

    def load(self, project: Path) -> None:
        """From the Hub, then from the cache alone."""
        model = (sys.executable, "-c", MODEL, str(self.folder / "qwen3"), REPO)
        self.step(self.user, "from_pretrained with KernelConfig, from the Hub", *model)
        hf = str(Path(sys.executable).with_name("hf"))
        self.step(self.user, "get all", hf, "download", REPO, "--type", "kernel", "--revision", self.branch)
        self.step(self.user, "from_pretrained without a network", *model, offline=True)
        app = (sys.executable, str(project / "locked_app.py"))
        self.step(self.user, "the locked application without a network", *app, offline=True)

    def damage_and_mend(self) -> None:
        """`kernels` loads what is in the cache; verification says whether that is what was published."""
        verify = (sys.executable, "-c", VERIFY)
        (file,) = self.user.cache.glob("snapshots/*/build/torch-stable-abi*/plugin.py")
        blob = file.resolve()
        blob.write_bytes(blob.read_bytes()[:-1] + b" ")
        self.step(self.user, "verify, after one byte of the cache was changed", *verify, status=1, lines=8)
        hf = str(Path(sys.executable).with_name("hf"))
        again = (hf, "download", REPO, "--type", "kernel", "--revision", self.branch, "--force-download")
        self.step(self.user, "mend", *again)
        self.step(self.user, "verify", *verify, lines=5)


def main() -> int:
    """Run the demo; returns the exit status."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hub-demo-") as name, Hub(Path(name) / "hub") as hub:
        hub.trusted.add(REPO.split("/")[0])
        print(f"a Hub on {hub.url}; its publisher {REPO.split('/')[0]} is trusted")
        try:
            Demo(hub, Path(name)).run()
        except subprocess.TimeoutExpired as error:
            print(f"hub-demo: no answer within {error.timeout:.0f} s from {error.cmd[:4]}", file=sys.stderr)
            return 1
        commit = hub.store.repository(REPO).resolve("main").oid
    print(f"\nhub-demo: every step as it should be, {time.monotonic() - begin:.0f} s (main {commit[:12]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
