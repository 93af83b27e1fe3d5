"""The optimisers of a run: AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


def build_optimizers(model: nn.Module, kind: str, lr: float, matrix_lr: float) -> list[Optimizer]:
    """kind: "adamw" or "muon". Muon takes the weights of fc and of the layers; tables, norms, heads stay with AdamW."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    matrices = [weight for name, weight in trained.items() if weight.dim() == 2 and name.startswith(("fc.", "layers."))]
    chosen = {id(weight) for weight in matrices} if kind == "muon" else set()
    rest = [weight for weight in trained.values() if id(weight) not in chosen]
    optimizers: list[Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    if kind == "muon":
        optimizers.append(
            torch.optim.Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers
