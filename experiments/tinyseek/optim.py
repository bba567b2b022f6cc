"""Muon for the matrices, AdamW for the rest.

Muon (K. Jordan, 2024) replaces a matrix's momentum M = U S Vᵀ by about U Vᵀ: every direction is stepped equally
far. Five Newton-Schulz iterations do it without an SVD. Scaled by 0.2·sqrt(max(rows, columns)) its entries have
the RMS of an AdamW step (Moonshot's Moonlight report, 2025), so that both optimisers share one learning rate
and one weight decay. Matrices of one shape, the experts of all layers above all, are one batch of the
iteration.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(m: Tensor, dtype: torch.dtype) -> Tensor:
    """m [N, R, C] -> about U Vᵀ of each matrix, singular values within some 30 % of 1."""
    a, b, c = NEWTON_SCHULZ
    x = m.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if tall else x


class Muon:
    """Muon with Nesterov momentum 0.95 and decoupled weight decay over parameters of two or more dimensions (the
    leading ones count separate matrices)."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95):
        shapes: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            shapes[tuple(p.shape[-2:])].append(p)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros_like(self._stack(group)) for group in self.groups]
        self.momentum = momentum
        self.dtype = torch.bfloat16 if params[0].is_cuda else torch.float32

    @staticmethod
    def _stack(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1, *t.shape[-2:]) for t in tensors])

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """One update from the parameters' gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = self._stack([p.grad for p in group])
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum), self.dtype).to(buffer.dtype)
            update *= 0.2 * max(update.shape[-2:]) ** 0.5
            parts = update.split([p.numel() // (p.shape[-2] * p.shape[-1]) for p in group])
            torch._foreach_mul_(group, 1 - lr * weight_decay)
            torch._foreach_add_(group, [u.view_as(p) for u, p in zip(parts, group, strict=True)], alpha=-lr)


class Optimiser:
    """The whole model's optimiser: `name` "muon" or "adamw". Norms and routers are never decayed."""

    def __init__(self, model: nn.Module, name: str, weight_decay: float):
        tables = ("embed_tokens.weight", "lm_head.weight")
        plain, decayed, matrices = [], [], []
        for key, p in model.named_parameters():
            if p.ndim == 1 or key.endswith("gate.weight"):
                plain.append(p)
            elif name == "adamw" or key in tables:
                decayed.append(p)
            else:
                matrices.append(p)
        self.weight_decay = weight_decay
        self.muon = Muon(matrices) if matrices else None
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=plain[0].is_cuda or None)

    def step(self, lr: float) -> None:
        """One update, then clear the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        if self.muon:
            self.muon.step(lr, self.weight_decay)
            for group in self.muon.groups:
                for p in group:
                    p.grad = None
        self.adamw.zero_grad(set_to_none=True)
