"""Muon for the matrices and AdamW for everything else, under one learning rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPS = 1e-10
UPDATE_RMS = 0.2  # of an orthogonalised update: AdamW's usual size, so both parts share a learning rate
# the quintic iteration x <- a x + b (x x^T) x + c (x x^T)^2 x that pushes singular values towards 1 (Jordan, 2024)
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(batch: Tensor) -> Tensor:
    """Return matrices [count, rows, columns], rows <= columns, with their singular values brought near 1."""
    a, b, c = QUINTIC
    x = batch / (batch.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Optimiser:
    """Steps a network's parameters; matrices of one shape are updated as one batch."""

    def __init__(self, network: nn.Module, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.count = 0
        matrices = [p for name, p in network.named_parameters() if p.dim() == 2 and "embed" not in name]
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
        device = next(network.parameters()).device
        self.momenta = {key: torch.zeros(len(group), *key, device=device) for key, group in self.groups.items()}
        self.others = [p for name, p in network.named_parameters() if p.dim() == 1 or "embed" in name]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients with this learning rate and clear them."""
        self.count += 1
        for key, group in self.groups.items():
            self._step_matrices(key, group, rate)
        self._step_others(rate)
        for parameter in (*(p for group in self.groups.values() for p in group), *self.others):
            parameter.grad = None

    def _step_matrices(self, key: tuple[int, int], group: list[Tensor], rate: float) -> None:
        lying = [p.shape == key for p in group]
        gradients = torch.stack([p.grad if flat else p.grad.T for p, flat in zip(group, lying, strict=True)])
        momentum = self.momenta[key].lerp_(gradients, 1 - MOMENTUM)
        updates = orthogonalise(gradients.lerp(momentum, MOMENTUM)) * (UPDATE_RMS * max(key) ** 0.5)
        torch._foreach_mul_(group, 1 - rate * self.weight_decay)
        steps = [update if flat else update.T for update, flat in zip(updates, lying, strict=True)]
        torch._foreach_add_(group, steps, alpha=-rate)

    def _step_others(self, rate: float) -> None:
        gradients = [p.grad for p in self.others]
        torch._foreach_lerp_(self.first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self.second, BETAS[1])
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - BETAS[1])
        scale = (1 - BETAS[1] ** self.count) ** 0.5 / (1 - BETAS[0] ** self.count)
        roots = torch._foreach_sqrt(self.second)
        torch._foreach_add_(roots, EPS)
        decayed = [p for p in self.others if p.dim() == 2]
        torch._foreach_mul_(decayed, 1 - rate * self.weight_decay)
        torch._foreach_addcdiv_(self.others, self.first, roots, value=-rate * scale)
