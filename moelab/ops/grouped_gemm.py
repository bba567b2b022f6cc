"""One matrix per expert over the rows that were dispatched to it (the masked layout).

Rows stand expert-major in a padded buffer with a count per expert; what lies beyond a count was never written and is
never read: it may hold NaN.
"""

from __future__ import annotations

import torch


def grouped_gemm(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [E, M, K], weight [E, N, K], counts [E] int32 -> [E, M, N]; rows beyond counts[e] are left unwritten."""
    out = rows.new_empty(*rows.shape[:2], weight.shape[1])
    for expert, count in enumerate(counts.tolist()):
        if count:
            torch.mm(rows[expert, :count], weight[expert].T, out=out[expert, :count])
    return out
