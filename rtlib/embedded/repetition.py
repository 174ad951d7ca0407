"""Teaches a network not to repeat itself: unlikelihood of what its own greedy completions write again and again.

After Welleck et al., "Neural Text Generation with Unlikelihood Training" (2019), with lines and short periods in
place of n-grams: in code the same few tokens come back all the time, whole lines seldom do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rtlib.embedded.network import Network

SHORTEST_LINE = 4  # tokens, line end included; "else:" may come again
LONGEST_PERIOD = 8  # tokens; two equal periods in a row make the second a repetition


def repeated_lines(ids: list[int], line_end: int) -> list[bool]:
    """Return for each token whether it belongs to a line that stood in `ids` before, indentation included."""
    marks, seen, line = [], set(), []
    for token in ids:
        line.append(token)
        if token == line_end:
            again = len(line) >= SHORTEST_LINE and tuple(line) in seen
            marks += [again] * len(line)
            seen.add(tuple(line))
            line = []
    unfinished = len(line) >= SHORTEST_LINE and any(tuple(line) == other[: len(line)] for other in seen)
    return marks + [unfinished] * len(line)


def repeated_periods(ids: list[int]) -> list[bool]:
    """Return for each token whether it ends two equal runs of 2 to LONGEST_PERIOD tokens, one behind the other."""

    def ends_two(stop: int) -> bool:
        periods = range(2, min(LONGEST_PERIOD, stop // 2) + 1)
        return any(ids[stop - p : stop] == ids[stop - 2 * p : stop - p] for p in periods)

    return [ends_two(position + 1) for position in range(len(ids))]


@torch.no_grad()
def greedy(network: Network, prompts: Tensor, count: int) -> Tensor:
    """Return prompts [batch, tokens] with `count` greedy tokens behind each; stop tokens are tokens like others."""
    was_training = network.training
    network.eval()
    ids = prompts
    for _ in range(count):
        ids = torch.cat((ids, network(ids)[:, -1:].argmax(-1)), dim=1)
    network.train(was_training)
    return ids


def unlikelihood(network: Network, prompts: Tensor, count: int, line_end: int) -> Tensor:
    """Return the mean of -log(1 - p) over the completions' tokens that repeat."""
    ids = greedy(network, prompts, count)
    rows = ids.tolist()
    lines = torch.tensor([repeated_lines(row, line_end) for row in rows], device=ids.device)
    marks = lines | torch.tensor([repeated_periods(row) for row in rows], device=ids.device)
    marks[:, : prompts.shape[1]] = False
    logits = network(ids[:, :-1]).float()
    chosen = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    penalties = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4)) * marks[:, 1:]
    return penalties.sum() / marks.sum().clamp(min=1)
