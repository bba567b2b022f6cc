"""Which experts a token goes to, and with what weight.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): s = sigmoid(logits); experts are *chosen* by s + bias, group by group (a
group scores the sum of its two best, the best `topk_group` groups stay), but *weighted* by s alone, normalised over
the chosen and multiplied by the routed scaling factor. The bias balances load and must never reach the output.

Dropped groups are masked with −inf: a zero would beat any expert whose biased score is negative. All in float32.
Mixtral's router is the case of softmax scores, one group and no bias. On ties the lower id wins. Padding, as
in a step that replays a larger captured graph, is routed nowhere: ids −1, weights 0.

`route` is the definition, in plain torch: about ten launches. `route_fused` computes the same in one, a warp per token.
A NaN score counts as the greatest, as in torch's sort: ids stay in range, and the weights of that token are NaN.

How the kernel picks. A float32 whose lower 31 bits are flipped if it is negative orders like an int32, and for 32-bit
integers a warp has a reduction of one instruction (redux.sync), against five shuffles for floats. So a pick is two
reductions: the largest key, then the lowest id that holds it. −inf leaves one integer below it free, which marks
what is taken or padding: it can never be picked, not even from a token whose scores are all −inf. The weights are
computed again from the K chosen logits, which are in L1 by then.
"""

from __future__ import annotations

import torch

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl, triton

if triton is not None:
    from triton.language.extra import libdevice

SCORINGS = ("sigmoid", "softmax")
IDS_DTYPES = (torch.int32, torch.int64)
MAX_EXPERTS = 1024  # 32 keys per thread of the one warp
MAX_GROUPS = 8


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, K], weights float32 [T, K]).

    Ids of a token come in falling order of their biased score. Weights already hold `scale`. `real`, bool [T]: the
    other tokens are padding, whose logits may hold anything.
    """
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    biased = scores if bias is None else scores + bias.float()
    ids = _top(_keep_groups(biased, n_group, topk_group), top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if real is None:
        return ids, weights * scale
    padding = ~real[:, None]
    return ids.masked_fill(padding, -1), (weights * scale).masked_fill(padding, 0.0)


def _keep_groups(biased: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    if topk_group == n_group:
        return biased
    grouped = biased.unflatten(-1, (n_group, biased.shape[-1] // n_group))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, _top(group_scores, topk_group), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest, the lower index first among equals (torch.topk leaves that open)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route_fused(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    real: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, in one launch on CUDA tensors; may be captured in a CUDA graph. Anywhere else it calls `route`.

    logits float32 [T, E ≤ 1024], rows contiguous at any stride; bias float32 [E] or None -> (ids [T, K] of `ids_dtype`,
    int32 or int64; weights float32 [T, K]). At most 8 groups, and top_k experts must be left in those that stay.
    `real` is read on the device.
    """
    _check(logits, bias, top_k, n_group, topk_group, scoring, real, ids_dtype)
    if not runs_on(_route_kernel, logits):
        ids, weights = route(
            logits, bias, top_k=top_k, n_group=n_group, topk_group=topk_group, scoring=scoring,
            renormalize=renormalize, scale=scale, real=real,
        )  # fmt: skip
        return ids.to(ids_dtype).contiguous(), weights
    rows, num_experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=ids_dtype, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        size, early = num_experts // n_group, launches_early(logits)
        _route_kernel[(rows,)](
            logits, bias, real, ids, weights, logits.stride(0), float(scale),
            GROUPS=n_group, SIZE=size, TOPK_GROUP=topk_group, TOP_K=top_k, SOFTMAX=scoring == "softmax",
            RENORMALIZE=renormalize, EXACT_EXP=logits.is_cuda,
            GROUPS_PADDED=triton.next_power_of_2(n_group), SIZE_PADDED=triton.next_power_of_2(size),
            K_PADDED=triton.next_power_of_2(top_k), EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return ids, weights


def _check(logits, bias, top_k, n_group, topk_group, scoring, real, ids_dtype) -> None:
    check_tensor("logits", logits, ("T", "E"), (torch.float32,))
    experts = logits.shape[1]
    require(1 <= experts <= MAX_EXPERTS, "the number of experts, logits' second size,", experts, f"1…{MAX_EXPERTS}")
    if bias is not None:
        check_tensor("bias", bias, (experts,), (torch.float32,), like=logits)
    groups = [n for n in range(1, MAX_GROUPS + 1) if experts % n == 0]
    require(n_group in groups, "n_group", n_group, f"{groups} for {experts} experts")
    require(1 <= topk_group <= n_group, "topk_group", topk_group, f"1…{n_group}, the number of groups")
    left = topk_group * (experts // n_group)
    require(1 <= top_k <= left, "top_k", top_k, f"1…{left}, the experts of the groups that stay")
    require(scoring in SCORINGS, "scoring", repr(scoring), " or ".join(map(repr, SCORINGS)))
    if real is not None:
        check_tensor("real", real, (logits.shape[0],), (torch.bool,), like=logits)
        require(real.is_contiguous(), "real's strides", real.stride(), "contiguous")
    require(ids_dtype in IDS_DTYPES, "ids_dtype", ids_dtype, " or ".join(map(str, IDS_DTYPES)))


@jit
def _key(x):
    """float32 -> int32 of the same order, all NaNs on top. Never sees −0: scores are sums with a +0 or more."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _exp(x, EXACT: tl.constexpr):
    """The exponential torch uses, so that the same scores tie; the interpreter has no libdevice."""
    if EXACT:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@jit
def _sigmoid(x, live, EXACT: tl.constexpr):
    """As torch computes it, 1 / (1 + exp(−x)), where `live`."""
    below = 1.0 + _exp(-x, EXACT)
    if EXACT:
        # div_rn has a branch for each quotient, so that a thread's eight come one after another. Below 2^125 they need
        # none: one Newton step makes a reciprocal of one ulp the rounded one. So one branch does for all.
        if tl.max(tl.where(live, below.to(tl.int32, bitcast=True), 0)) < 0x7E000000:
            rough = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=tl.float32, is_pure=True, pack=1
            )
            scores = tl.fma(tl.fma(-below, rough, 1.0), rough, rough)
        else:
            scores = tl.div_rn(1.0, below)
        return scores
    else:
        return tl.div_rn(1.0, below)


@jit
def _route_kernel(
    logits_ptr, bias_ptr, real_ptr, ids_ptr, weights_ptr, stride, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr, EXACT_EXP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, SIZE_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
    EARLY: tl.constexpr, NONE: tl.constexpr = -(2**31),
):  # fmt: skip
    # NONE, one below the key of −inf: taken, or padding.
    if EARLY:
        # One warp a token leaves room for the next kernel at once: 2.19 instead of 2.25 µs at 256 tokens on an H200.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, SIZE_PADDED)
    live = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    expert = group[:, None] * SIZE + member[None, :]

    # Everything is asked for at once: between a bias loaded later and the logits lies the latency of the L2.
    x = tl.load(row_ptr + expert, mask=live, other=float("-inf"))
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=live, other=0.0)
    if real_ptr is not None:
        is_real = tl.load(real_ptr + token) != 0
    if SOFTMAX:
        top = tl.max(x)
        scores = _exp(x - top, EXACT_EXP)
        total = tl.sum(scores)
        scores = tl.div_rn(scores, total)
    else:
        scores = _sigmoid(x, live, EXACT_EXP)
    if bias_ptr is not None:
        scores += bias
    keys = tl.where(live, _key(scores), NONE)

    if TOPK_GROUP < GROUPS:
        best = tl.max(keys, axis=1)
        if SIZE > 1:
            twice = tl.sum((keys == best[:, None]).to(tl.int32), axis=1) > 1
            rest = tl.max(tl.where(keys < best[:, None], keys, NONE), axis=1)
            best = _key(_value(best) + _value(tl.where(twice, best, rest)))
        best = tl.where(group < GROUPS, best, NONE)
        mine, other = best[:, None], best[None, :]
        beaten = (other > mine) | ((other == mine) & (group[None, :] < group[:, None]))
        kept = tl.sum(beaten.to(tl.int32), axis=1) < TOPK_GROUP
        keys = tl.where(kept[:, None] | (keys == NONE), keys, _key(tl.full((), float("-inf"), tl.float32)))

    k = tl.arange(0, K_PADDED)
    ids = tl.zeros((K_PADDED,), tl.int32)
    for pick in tl.static_range(TOP_K):
        chosen = tl.min(tl.where(keys == tl.max(keys), expert, GROUPS * SIZE))
        keys = tl.where(expert == chosen, NONE, keys)
        ids = tl.where(k == pick, chosen, ids)

    x = tl.load(row_ptr + ids, mask=k < TOP_K, other=float("-inf"))
    if SOFTMAX:
        weights = tl.div_rn(_exp(x - top, EXACT_EXP), total)
    else:
        weights = tl.div_rn(1.0, 1.0 + _exp(-x, EXACT_EXP))
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.sum(tl.where(k < TOP_K, weights, 0.0)) + 1e-20)
    weights *= scale
    if real_ptr is not None:
        ids, weights = tl.where(is_real, ids, -1), tl.where(is_real, weights, 0.0)
    tl.store(ids_ptr + token * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)
