"""Steps of MLA decode for tests: shuffled pages, NaN wherever no token is, and what float64 makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.ops.mla_cache import PAGE_SIZE, ROW_DIM, Fp8Cache, LatentCache, read_rows

SCALE = 192**-0.5 * 1.873854  # YaRN's m² in it, as the checkpoint has it
LOWEST = torch.iinfo(torch.int32).min


@dataclass
class Step:
    q_latent: Tensor  # a slice of wider rows, as is q_pe
    q_pe: Tensor
    rows: Tensor  # bfloat16 [pages, 64, 576], NaN where no token is
    page_table: Tensor  # int32 [B, P], garbage beyond a sequence's pages
    kv_lens: list[int]
    q_lens: list[int]

    def cache(self, kv: str, device: torch.device) -> LatentCache:
        if kv == "bf16":
            return self.rows.to(device)
        whole = Fp8Cache.from_rows(self.rows)
        return Fp8Cache(whole.values.to(device), whole.scales.to(device), whole.rope.to(device))

    def plan(self, decode) -> None:
        decode.plan(self.page_table, self.kv_lens, self.q_lens)

    def queries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """On `device`, with the strides they have here."""
        wide = torch.full((*self.q_latent.shape[:2], 512 + 192), float("nan"), dtype=torch.bfloat16, device=device)
        q_latent, q_pe = wide[..., :512], wide[..., -64:]
        q_latent.copy_(self.q_latent)
        q_pe.copy_(self.q_pe)
        return q_latent, q_pe

    def exact(self, kv: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """(out [T, heads, 512], lse [T, heads]) in float64, reckoned on `device` from the cache as it is stored; on a
        GPU from FP8 rows turned into bfloat16, as the kernels there multiply them."""
        cache, outs, logs, start = self.cache(kv, device), [], [], 0
        queries = torch.cat(self.queries(device), -1).double()
        for table, kv_len, q_len in zip(self.page_table.long(), self.kv_lens, self.q_lens, strict=True):
            slots = [int(table[i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in range(kv_len)]
            rows = read_rows(cache, torch.tensor(slots, dtype=torch.int64, device=device))
            rows = rows.to(torch.bfloat16).double() if device.type == "cuda" else rows.double()
            q = queries[start : start + q_len]
            scores = torch.einsum("qhd,ld->qhl", q, rows) * SCALE
            hidden = torch.arange(kv_len) > torch.arange(q_len)[:, None] + kv_len - q_len
            scores = scores.masked_fill(hidden[:, None].to(device), float("-inf"))
            logs.append(scores.logsumexp(-1))
            weights = (scores - logs[-1][..., None]).exp().nan_to_num()
            outs.append(torch.einsum("qhl,lv->qhv", weights, rows[:, :512]))
            start += q_len
        return torch.cat(outs).cpu(), torch.cat(logs).cpu()


def draw(heads: int, kv_lens: list[int], q_lens: list[int], spare_pages: int = 3) -> Step:
    """Random queries and rows; the pages of all sequences are shuffled among each other and some that nobody has."""
    counts = [-(-n // PAGE_SIZE) for n in kv_lens]
    pages = sum(counts) + spare_pages
    order = torch.randperm(pages).to(torch.int32)
    table = torch.full((len(kv_lens), max(counts) + 1), LOWEST, dtype=torch.int32)
    rows, taken = torch.full((pages, PAGE_SIZE, ROW_DIM), float("nan"), dtype=torch.bfloat16), 0
    for sequence, (count, kv_len) in enumerate(zip(counts, kv_lens, strict=True)):
        mine = order[taken : taken + count]
        table[sequence, :count], taken = mine, taken + count
        filled = torch.full((count * PAGE_SIZE, ROW_DIM), float("nan"))
        filled[:kv_len] = torch.randn(kv_len, ROW_DIM) * torch.rand(kv_len, 1).mul(2).exp() / 4
        rows[mine.long()] = filled.view(count, PAGE_SIZE, ROW_DIM).to(torch.bfloat16)
    tokens = sum(q_lens)
    q = torch.randn(2, tokens, heads, 512).to(torch.bfloat16)
    return Step(q[0], q[1, ..., :64], rows, table, kv_lens, q_lens)


def assert_close(out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor]) -> None:
    """Probabilities and result are rounded to bfloat16, sums are float32."""
    want, want_lse = exact
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=0, atol=1e-3)
    out, scale = out.cpu().double(), want.abs().amax(-1, keepdim=True)
    assert not out.isnan().any()
    assert ((out - want).abs() <= 2**-6 * scale).all(), float(((out - want).abs() / scale.clamp(min=1e-30)).max())
    errors = (out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    assert (errors < 2**-7).all(), float(errors.max())
