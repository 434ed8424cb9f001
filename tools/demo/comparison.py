"""Are the tokens equal? Both models are led along the stock model's own greedy answer and compared at each position.

Both see the same prefix at each position, so one differing pick cannot spoil the positions after it.

The bound. Two correct bfloat16 computations of the same model do not give the same bits: a sum taken in another order
may round the other way. How far can that move the gap between the logits of two candidates a and b?

- bfloat16 has 8 significant bits: a rounding changes a value by at most u = 2**-8 of it, evenly spread, so by
  u / sqrt(3) in the root mean square.
- The stream h through L layers is rounded at each of its 2 L additions and twice in the last norm: R = 2 L + 2 times.
  Independent roundings add up like the steps of a random walk: each component of the last h is off by about
  u * sqrt(R / 3) of itself, and by sqrt(2) times that between two models that round independently.
- The gap is (w_a - w_b) . h, with the rows w of the output embedding. It is off by
  sigma = sqrt(2) * u * sqrt(R / 3) * ||(w_a - w_b) * h||   (product by component, Euclidean norm).
- Each of the four logits is rounded once more when it is stored, by at most half a spacing of bfloat16 at its size:
  2 spacings in all.

bound = 3 * sigma + 2 * spacing. Of a normal deviation 0.3 % lies beyond 3 sigma. Where the picks differ, but the
candidates' logits lie within the bound in both models, the position is a tie: the format cannot tell the two apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

UNIT_ROUNDOFF = 2.0**-8


@dataclass(frozen=True)
class Trace:
    """One model along one answer: tokens, and per position the logits [N, vocabulary] and last states [N, hidden]."""

    tokens: list[int]
    logits: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class Position:
    """A position at which the two models pick different tokens."""

    index: int
    stock: int
    ours: int
    stock_gap: float
    our_gap: float
    bound: float

    @property
    def is_tie(self) -> bool:
        """Whether the two candidates cannot be told apart in bfloat16."""
        return self.stock_gap <= self.bound and self.our_gap <= self.bound


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison: how many positions, their bounds, and those where the picks differ."""

    total: int
    bounds: list[float]
    disputed: list[Position] = field(default_factory=list)

    @property
    def ties(self) -> int:
        """Positions with different picks whose candidates lie within the bound."""
        return sum(position.is_tie for position in self.disputed)

    @property
    def equal(self) -> int:
        """Positions with the same pick, and ties."""
        return self.total - len(self.disputed) + self.ties


@torch.inference_mode()
def follow(model: nn.Module, prompt: torch.Tensor, length: int, forced: list[int] | None = None) -> Trace:
    """Prefill `prompt` [1, T], then `length` positions: greedily, or along the tokens `forced`."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    decoder = model.base_model
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    step, cache = prompt, None
    for index in range(length):
        output = decoder(input_ids=step, past_key_values=cache, use_cache=True)  # type: ignore[operator]
        cache = output.past_key_values
        states.append(output.last_hidden_state[0, -1])
        logits.append(head(output.last_hidden_state[:, -1:])[0, -1])
        tokens.append(int(logits[-1].argmax()) if forced is None else forced[index])
        step = torch.tensor([[tokens[-1]]])
    return Trace(tokens, torch.stack(logits).float(), torch.stack(states).float())


def rounding_sigma(difference: torch.Tensor, state: torch.Tensor, layers: int) -> float:
    """Root mean square of what rounding does to a gap between two models; the formula is at the top of this file.

    Args:
        difference: w_a - w_b [hidden], fp32.
        state: the last hidden state h [hidden], fp32.
        layers: number of decoder layers L.
    """
    roundings = 2 * layers + 2
    return math.sqrt(2.0) * UNIT_ROUNDOFF * math.sqrt(roundings / 3.0) * float((difference * state).norm())


def spacing(value: float) -> float:
    """Distance of neighbouring bfloat16 numbers at the size of `value`; 0 at 0."""
    return 0.0 if value == 0.0 else 2.0 ** (math.floor(math.log2(abs(value))) - 7)


def gap_bound(weights: torch.Tensor, trace: Trace, index: int, pair: tuple[int, int], layers: int) -> float:
    """The bound of the file's head for the candidates `pair` at position `index` of the stock model's trace."""
    first, second = pair
    difference = weights[first].float() - weights[second].float()
    largest = max(abs(float(trace.logits[index, token])) for token in pair)
    return 3.0 * rounding_sigma(difference, trace.states[index], layers) + 2.0 * spacing(largest)


@torch.inference_mode()
def compare(stock: Trace, ours: Trace, weights: torch.Tensor, layers: int) -> Comparison:
    """Compare two traces along the same tokens.

    Args:
        stock: the reference; its picks are its tokens.
        ours: the model under test, led along `stock.tokens`.
        weights: the output embedding [vocabulary, hidden].
        layers: number of decoder layers.

    Raises:
        ValueError: if the two traces do not follow the same tokens.
    """
    if stock.tokens != ours.tokens:
        raise ValueError("the traces follow different tokens; lead the second model along the first one's answer")
    bounds, disputed = [], []
    for index in range(len(stock.tokens)):
        first, runner_up = stock.logits[index].topk(2).indices.tolist()
        bounds.append(gap_bound(weights, stock, index, (first, runner_up), layers))
        picked, other = int(stock.logits[index].argmax()), int(ours.logits[index].argmax())
        if picked == other:
            continue
        stock_gap = float(stock.logits[index, picked] - stock.logits[index, other])
        our_gap = float(ours.logits[index, other] - ours.logits[index, picked])
        bound = gap_bound(weights, stock, index, (picked, other), layers)
        disputed.append(Position(index, picked, other, stock_gap, our_gap, bound))
    return Comparison(len(stock.tokens), bounds, disputed)
