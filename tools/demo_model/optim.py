"""Muon for the matrices, AdamW for everything else.

Muon replaces the momentum of a weight matrix by the nearest matrix with orthonormal rows or columns (Newton-Schulz
iteration), so every direction of the matrix moves equally fast.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(G: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix of the batch G (n, rows, columns) towards one, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315  # quintic whose iterates settle near one fastest
    X = G.bfloat16()
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self.step_batch(params, group, max(1.0, shape[0] / shape[1]) ** 0.5)

    def step_batch(self, params: list[Tensor], group: dict, scale: float) -> None:
        grads = [p.grad for p in params]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        updates = list(orthogonalise(torch.stack(nesterov)).to(params[0].dtype).unbind())
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """The base rates stay in each group as `base_lr`; the schedule multiplies them."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        small = p.ndim != 2 or min(p.shape) < 16 or "embed_tokens" in name
        (others if small else matrices).append(p)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, matrix_lr, weight_decay=weight_decay)]
    if others:
        fused = others[0].is_cuda
        optimizers.append(torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers
