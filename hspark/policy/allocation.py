"""Device side of adaptive verification: which slots of the batch the budget pays for (the paper, section 4.4)."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(survival: Tensor, length: Tensor, budget: Tensor | int) -> Tensor:
    """Gives the `budget` best slots of the batch to the rows: int64 [B], how many slots each row keeps, from its front.

    survival: float [B, W], non-increasing along each row. Entries at or past `length` never win, nor do NaN entries and
    what lies behind one in its row.
    length: int64 [B], 0..W. budget: an int or an integer 0-dim tensor; 0 or less keeps nothing, a surplus stays unused.

    Only counts leave this function. Survival is non-increasing along a chain, so the best slots of a row are a prefix
    of it, and a count says all there is to say: equal survivals cannot leave a hole. Among equals the earlier slot
    wins, then the lower row; token values take no part, which rejection verification of sampled drafts relies on.

    Example: survival [[.9, .5, .1], [.8, .6, .4]], length [3, 3], budget 4: kept [2, 2] (.9, .8, .6, .5).
    """
    if survival.dim() != 2 or length.shape != survival.shape[:1]:
        raise ValueError(
            f"survival of shape {tuple(survival.shape)} and length of shape {tuple(length.shape)} do not fit together; "
            "use [B, W] and [B]"
        )
    inside = torch.arange(survival.shape[1], device=survival.device) < length[:, None]
    # A slot is kept only with all before it, so a chain ends before its first NaN.
    inside = inside & (survival.isnan().cumsum(dim=1) == 0)
    # Slots outside the chain rank below every slot inside, also below those whose survival is 0.
    score = torch.where(inside, survival, -1.0)
    # Slot-major order, so that the stable sort breaks ties by slot first: equal first slots of all rows come before
    # any second slot.
    order = score.t().reshape(-1).argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    chosen = (rank.view(survival.shape[1], survival.shape[0]) < budget) & inside.t()
    return chosen.sum(dim=0)
