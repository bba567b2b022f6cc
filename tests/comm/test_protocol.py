"""The protocol has no fault in any interleaving of small models; each safeguard that is taken out is missed."""

from __future__ import annotations

import pytest

from tests.comm.protocol import Model
from tests.comm.search import search


def routes(*tokens: tuple) -> tuple:
    return tuple(tuple(frozenset(d) for d in token) for token in tokens)


# No token; one that goes nowhere; to one rank, which may be its own; to both.
FEW = routes((), ((),), ((0,),), ((0, 1),))
FEWER = routes((), ((0,),), ((0, 1),))
BOTH_WAYS = frozenset({(0, 1), (1, 0)})

SOUND = {
    "any routing": Model(),
    "two blocks": Model(blocks=2, routes=FEWER),
    "two blocks, halves apart": Model(blocks=2, fused=False, routes=FEWER, exchanges=2),
    "two tokens on two blocks": Model(blocks=2, tokens=2, routes=routes((), ((0,), (1,)), ((1,), (0, 1))), exchanges=2),
    "three ranks": Model(ranks=3, routes=FEWER, exchanges=2),
    "a group of two": Model(tp=2, routes=FEW),
    "two slots": Model(slots=2, exchanges=4, fused=False, routes=routes((), ((0, 1),))),
    "numbers come round": Model(wrap=3, exchanges=7, routes=routes((), ((0,),))),
    "flags": Model(protocol="flags", routes=FEWER),
    "flags, two blocks": Model(protocol="flags", blocks=2, exchanges=2, routes=routes((), ((0, 1),))),
    "puts": Model(protocol="puts", remote=BOTH_WAYS, routes=FEWER),
    "puts one way, flags the other": Model(protocol="puts", remote=frozenset({(0, 1)}), tp=2, routes=FEWER),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_interleaving_has_a_fault(name):
    states, fault = search(SOUND[name])
    assert fault is None, str(fault)
    assert states > 100


# What can be taken out; each must be found by the search.
BREAKS = {
    "no barrier": "dispatch_send does not wait for `entered`",
    "barrier in one block": "only block 0 of dispatch_send waits for `entered`",
    "barrier of destinations": "dispatch_send waits for `entered` of the ranks it sends tokens to, not of all",
    "barrier compares for equality": "a late block sees the next number and waits for ever",
    "entered early": "dispatch_recv announces `entered` when it begins",
    "epoch stands still": "combine_recv does not advance the epoch",
    "epoch of block 0 only": "combine_recv advances the copy of its first block only",
    "no release": "a flag is stored without release",
    "signal before data": "a flag or signal does not wait for its data",
    "no wait for headers": "dispatch_recv reads headers without looking at their number",
    "no wait for tokens": "dispatch_recv reads tokens likewise",
    "no wait for outputs": "combine_recv reads outputs likewise",
    "headers of first ranks": "dispatch_recv waits for one header of each DP group, not of each rank",
    "nothing cleared": "what was read is left where it stands",
    "tokens cleared late": "combine_recv clears what dispatch_recv has read, after `entered` was sent",
}  # fmt: skip
BROKEN = [
    ("no barrier", "may be overwritten", {}),
    ("no barrier", "('header flag', 1, 0)", dict(protocol="flags", routes=FEW)),
    ("no barrier", "outbox", dict(protocol="puts", remote=BOTH_WAYS, routes=FEW)),
    ("barrier in one block", "may be overwritten", dict(blocks=2, tokens=2, exchanges=2, routes=routes(((0,), (0,))))),
    ("barrier of destinations", "may be overwritten", {}),
    ("barrier compares for equality", "`entered` 0", dict(blocks=2, routes=FEWER)),
    ("entered early", "may be overwritten", {}),
    ("epoch stands still", "of exchange 1 in exchange 2", {}),
    ("epoch of block 0 only", "", dict(blocks=2, routes=FEWER)),
    ("no release", "takes", dict(protocol="flags", routes=FEW)),
    ("signal before data", "takes", dict(protocol="puts", remote=BOTH_WAYS, routes=FEW)),
    ("no wait for headers", "takes ('header'", {}),
    ("no wait for tokens", "takes ('token'", {}),
    ("no wait for tokens", "takes ('token'", dict(protocol="flags", routes=FEW)),
    ("no wait for outputs", "takes ('output'", {}),
    ("no wait for outputs", "takes ('output'", dict(protocol="flags", routes=FEW)),
    ("headers of first ranks", "('output'", dict(tp=2, routes=FEW)),
    ("nothing cleared", "of exchange 1 in exchange 2", {}),
    ("tokens cleared late", "is cleared while a store", {}),
]  # fmt: skip


@pytest.mark.parametrize("broken, words, options", BROKEN)
def test_what_is_taken_out_is_missed(broken, words, options):
    states, fault = search(Model(broken=broken, **options))
    assert fault is not None, f"{states} states and no fault: {BREAKS[broken]}, and the search did not notice"
    print(f"{broken}: {BREAKS[broken]}\n{fault}")
    assert words in fault.what, str(fault)
    assert fault.trace and all(step.startswith("rank ") for step in fault.trace)


def test_every_safeguard_is_taken_out_once():
    assert {broken for broken, *_ in BROKEN} == set(BREAKS)
