"""What the kernels are given, and what becomes of what they report: with a library that only takes notes."""

from __future__ import annotations

import ctypes
import re
import threading

import pytest
import torch

from moelab.comm import AllToAll, CommError, ExchangeTimeout, InputError, Nvshmem, VirtualRanks
from moelab.comm.device_exchange import make_shape
from moelab.comm.library import Call, Dtype, Error, Halves, Protocol, Sizes, What
from moelab.comm.nvshmem import settings
from moelab.comm.spec import ExchangeSpec
from moelab.config import ConfigError, ParallelConfig

H, K, E, M = 256, 2, 4, 8


class Notes:
    """Stands in for `Library`: keeps a copy of each call; `on_launch` may play the kernel."""

    def __init__(self, packets: bool = True, most_blocks: int = 64) -> None:
        self.packets, self.most, self.calls, self.all_ranks = packets, most_blocks, [], []
        self.on_launch = lambda call: None

    def sizes(self, shape) -> Sizes:
        if shape.protocol == Protocol.PACKETS and not self.packets:
            raise CommError("packets do not serve it")
        return Sizes(256, 128, 256, 1234)

    def most_blocks(self, *arguments) -> int:
        return self.most

    def launch(self, shape, call, what, halves, *, blocks=0, early=False, stream) -> None:
        self.calls.append((What(what), Halves(halves), Call.from_buffer_copy(call)))
        self.on_launch(call)

    def launch_virtual(self, shape, calls, what, halves, *, blocks, quantize, out_dtype, stream) -> None:
        self.all_ranks.append((What(what), Halves(halves), blocks, quantize))


def exchange(library=None, payload: str = "bf16", **options) -> tuple[AllToAll, Notes]:
    library = library or Notes()
    group = VirtualRanks(1, library, one_launch=False).rank(0)
    return AllToAll(ParallelConfig(), E, K, H, M, payload, group=group, **options), library


def arguments(tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x = torch.randn(tokens, H).to(dtype)
    return x, torch.randint(E, (tokens, K)), torch.rand(tokens, K)


def values(address: int, count: int, kind=ctypes.c_uint16) -> list[int]:
    return list((kind * count).from_address(address))


def test_every_half_is_one_launch_with_what_it_was_given():
    a2a, notes = exchange(payload="fp8", slots=2)
    x, ids, weights = arguments(dtype=torch.float8_e4m3fn)
    scales, n = torch.rand(3, 2), torch.tensor([2], dtype=torch.int32)
    first = a2a.dispatch_send(x, ids.int(), weights, scales, num_tokens=n, has_work=False)
    rows, row_scales, counts = a2a.dispatch_recv(first)
    second, *_ = a2a.dispatch(x[:1], ids[:1], weights[:1], scales[:1])
    y, out = torch.zeros(a2a.spec.rows_shape, dtype=torch.bfloat16), torch.zeros(3, H, dtype=torch.float16)
    a2a.combine_send(first, y)
    a2a.combine_recv(first, out)
    a2a.combine(second, y, torch.zeros(1, H))

    halves = [(what, half) for what, half, _ in notes.calls]
    d, c = What.DISPATCH, What.COMBINE
    assert halves == [
        (d, Halves.SEND), (d, Halves.RECV), (d, Halves.FUSED), (c, Halves.SEND), (c, Halves.RECV), (c, Halves.FUSED),
    ]  # fmt: skip
    send, recv, fused, csend, crecv, cfused = (call for *_, call in notes.calls)
    assert (send.x, send.x_stride, send.tokens, send.has_work, send.quantize) == (x.data_ptr(), H, 3, 0, 0)
    assert (send.ids_bytes, list(send.ids_stride), list(send.weights_stride)) == (4, [K, 1], [K, 1])
    assert (send.scales, list(send.scales_stride), send.num_tokens) == (scales.data_ptr(), [2, 1], n.data_ptr())
    assert (recv.rows, recv.row_scales, recv.counts) == tuple(t.data_ptr() for t in (rows, row_scales, counts))
    assert (fused.slot, fused.tokens, fused.has_work, fused.num_tokens, fused.ids_bytes) == (1, 1, 1, None, 8)
    assert fused.rows != recv.rows and fused.starts is None
    assert (csend.slot, csend.y, crecv.out, crecv.out_dtype) == (0, y.data_ptr(), out.data_ptr(), Dtype.F16)
    assert (cfused.slot, cfused.out_dtype) == (1, Dtype.F32)


def scales_read(call: Call) -> list[list[float]]:
    """float32 [3, 2], as the kernels find them."""
    row, column = call.scales_stride
    return [
        [values(call.scales + 4 * (t * row + i * column), 1, ctypes.c_float)[0] for i in range(2)] for t in range(3)
    ]


def test_arguments_that_kernels_cannot_read_are_copied():
    a2a, notes = exchange(payload="fp8", slots=1)
    x, ids, weights = arguments(dtype=torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    want, seen = x.view(torch.uint8).flatten().tolist(), []
    wide = torch.zeros(3, H + 16, dtype=torch.uint8)
    wide[:, 8 : 8 + H] = x.view(torch.uint8)
    variants = {
        "transposed": x.view(torch.uint8).T.contiguous().T,
        "rows at an odd start": wide[:, 8 : 8 + H],
        "taken as it is": wide.clone()[:, :H].copy_(x.view(torch.uint8)),
    }

    def kernel(call: Call) -> None:  # what it would read, while it runs
        rows = [values(call.x + t * call.x_stride, H, ctypes.c_uint8) for t in range(3)]
        seen.append((sum(rows, []), scales_read(call)))

    for name, given in variants.items():
        notes.on_launch = kernel
        given_scales = scales.T.contiguous().T if name == "transposed" else scales
        h, *_ = a2a.dispatch(given.view(torch.float8_e4m3fn), ids.T.contiguous().T, weights, given_scales)
        rows, read_scales = seen.pop()
        assert rows == want, name
        assert read_scales == scales.tolist()
        assert notes.calls[-1][2].scales == given_scales.data_ptr()  # at any strides
        call = notes.calls[-1][2]
        assert call.x % 16 == call.x_stride % 16 == 0 and list(call.ids_stride) == [1, 3]
        assert (call.x == given.data_ptr()) == (name == "taken as it is")

        out = torch.full((H, 3), 7.0).T  # not contiguous, and rows that the kernel does not write stay
        y = torch.zeros(E * M * H + 1, dtype=torch.bfloat16)[1:].view(E, M, H)  # begins at 2 bytes

        def combine(call: Call) -> None:
            assert call.y % 16 == call.out % 16 == 0
            ctypes.c_float.from_address(call.out + 4 * (H + 1)).value = 5.0

        notes.on_launch = combine
        assert a2a.combine(h, y, out) is out
        assert out[1, 1] == 5.0 and out.sum() == 7.0 * (3 * H - 1) + 5.0


def test_bfloat16_is_quantised_by_the_kernel():
    a2a, notes = exchange(payload="fp8")
    x, ids, weights = arguments()
    a2a.dispatch_send(x, ids, weights)
    call = notes.calls[-1][2]
    assert (call.quantize, call.x, call.x_stride) == (1, x.data_ptr(), 2 * H)
    x, _, _ = arguments(dtype=torch.float8_e4m3fn)
    a2a.dispatch_send(x, ids, weights, torch.ones(3, 2))
    assert notes.calls[-1][2].quantize == 0


def report(notes: Notes, **words: int) -> None:
    """The next launch writes them to the error record."""

    def kernel(call: Call) -> None:
        record = (ctypes.c_uint64 * Error.WORDS).from_address(call.host_error)
        for name, value in words.items():
            record[Error[name]] = value
        notes.on_launch = lambda call: None

    notes.on_launch = kernel


@pytest.mark.parametrize("word, said", [("BAD_IDS", "ids other than 0…3 and -1"), ("BAD_COUNT", "num_tokens was not")])
def test_input_errors_of_the_device_are_raised_once_and_harm_nothing(word, said):
    a2a, notes = exchange()
    report(notes, **{word: 1})
    h = a2a.dispatch_send(*arguments())
    with pytest.raises(InputError, match=said):
        a2a.dispatch_recv(h)
    a2a.dispatch_recv(h)  # not moved on by the failed call
    report(notes, **{word: 1})
    a2a.combine_send(h, torch.zeros(a2a.spec.rows_shape, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=said):
        a2a.check()
    a2a.check()
    a2a.combine_recv(h, torch.zeros(3, H))


@pytest.mark.parametrize(
    "half, name, expected",
    [(1, "dispatch_send", "it to have read exchange 6"), (2, "dispatch_recv", "counts and tokens of exchange 6"),
     (4, "combine_recv", "outputs of exchange 6")],
)  # fmt: skip
@pytest.mark.parametrize("failed, seen", [(1, "exchange 5"), (2, "it gave up first")])
def test_a_wait_that_ended_on_the_device_names_what_is_missing(half, name, expected, failed, seen):
    a2a, notes = exchange()
    report(notes, FAILED=failed, HALF=half, PEER=3, EXPECTED=6, SEEN=5)
    with pytest.raises(ExchangeTimeout) as info:
        a2a.dispatch(*arguments())
    error = info.value
    assert (error.rank, error.peer, error.half, error.seen) == (0, 3, name, seen) and expected in error.expected
    for call in (a2a.check, lambda: a2a.dispatch(*arguments())):
        with pytest.raises(CommError, match="can no longer be used: it failed earlier .rank 0 in"):
            call()
    a2a.close()
    a2a.close()


def test_closing_says_what_no_call_has_raised(caplog):
    a2a, notes = exchange()
    report(notes, BAD_IDS=1)
    a2a.dispatch_send(*arguments())
    a2a.close()
    assert "closed after an error that no call has raised: in an earlier dispatch topk_ids held ids" in caplog.text


def test_all_idle_is_read_late_and_gone_when_the_slot_is_taken():
    a2a, notes = exchange(slots=1)

    def idle(value: int) -> None:
        notes.on_launch = lambda call: setattr(ctypes.c_int32.from_address(call.all_idle), "value", value)

    idle(1)
    h, *_ = a2a.dispatch(*arguments(0))
    assert h.all_idle is True
    idle(0)
    a2a.combine(h, torch.zeros(a2a.spec.rows_shape, dtype=torch.bfloat16), torch.zeros(0, H))
    assert h.all_idle is False  # nobody has taken the slot: what stands there is read each time
    a2a.dispatch(*arguments(0))
    with pytest.raises(CommError, match="all_idle of exchange 0 is gone: exchange 1 has its slot"):
        _ = h.all_idle


def test_bytes_are_not_counted():
    with pytest.raises(CommError, match="moelab.comm.traffic counts it"):
        _ = exchange()[0].sent_bytes


# ---- choices


def spec(**options) -> ExchangeSpec:
    return ExchangeSpec(ParallelConfig(), E, K, H, M, **options)


def test_packets_where_they_serve_and_puts_where_somebody_is_not_mapped():
    def chosen(library: Notes, **how) -> int:
        return make_shape(spec(), library, "rows", **{"all_mapped": True} | how)[0].protocol

    assert chosen(Notes()) == Protocol.PACKETS
    assert chosen(Notes(), packets=False) == Protocol.FLAGS
    assert chosen(Notes(packets=False)) == Protocol.FLAGS
    assert chosen(Notes(), all_mapped=False) == Protocol.PUTS
    with pytest.raises(CommError, match=f"1234 contiguous rows, this moelab {spec(layout='contiguous_128').capacity}"):
        make_shape(spec(layout="contiguous_128"), Notes(), "rows", all_mapped=True)
    with pytest.raises(ConfigError, match="returns is 'bf16' but a float32 payload"):
        make_shape(spec(payload="f32"), Notes(), "bf16", all_mapped=True)


def test_options_name_what_is_legal():
    with pytest.raises(ConfigError, match="returns is 'y': legal are 'rows', 'f32', 'bf16'"):
        Nvshmem(returns="y")
    with pytest.raises(ConfigError, match="num_blocks is -1"):
        Nvshmem(num_blocks=-1)
    for group, words in [
        (Nvshmem(), "torch.distributed is not initialised"),
        (Nvshmem(VirtualRanks(1).rank(0)), r"make the ranks with kernels, VirtualRanks\(ep, library\)"),
        (Nvshmem(VirtualRanks(1, Notes()).rank(0), puts_to=(0,)), "puts need processes"),
        (Nvshmem(VirtualRanks(2, Notes()).rank(0)), "group has 2 ranks but ep = dp·tp is 1"),
    ]:
        with pytest.raises((ConfigError, CommError), match=words):
            AllToAll(ParallelConfig(), E, K, H, M, group=group)


def test_settings_follow_nccl_and_keep_multicast_off(monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert settings(one_host=True, heap_bytes=5) == {
        "NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_SYMMETRIC_SIZE": str(2**30),
    }  # fmt: skip
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    found = settings(one_host=False, heap_bytes=3 * 2**30)
    assert found["NVSHMEM_HCA_LIST"] == "mlx5_0" and found["NVSHMEM_SYMMETRIC_SIZE"] == str(3 * 2**30)
    assert "NVSHMEM_REMOTE_TRANSPORT" not in found and "NVSHMEM_IB_GID_INDEX" not in found


# ---- all ranks in one launch


def together(size: int, library: Notes, play, ranks=None) -> list:
    """Each rank's result, or the error it ended with."""
    world, results = VirtualRanks(size, library), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = play(rank, world.rank(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def construct(rank: int, group, **options) -> AllToAll:
    return AllToAll(ParallelConfig(dp=4), E, K, H, M, group=group, **{"timeout_s": 10} | options)


def test_the_last_rank_to_come_launches_for_all():
    def play(rank: int, group) -> str:
        a2a = construct(rank, group)
        for _ in range(3):
            h = a2a.dispatch_send(*arguments(rank))
            a2a.dispatch_recv(h)
            a2a.combine(h, torch.zeros(a2a.spec.rows_shape, dtype=torch.bfloat16), torch.zeros(rank, H))
        return "done"

    notes = Notes(most_blocks=13)
    assert together(4, notes, play) == ["done"] * 4
    d, c = What.DISPATCH, What.COMBINE
    assert notes.all_ranks == [(d, Halves.SEND, 3, False), (d, Halves.RECV, 3, False), (c, Halves.FUSED, 3, False)] * 3


def test_a_rank_that_stays_away_is_named():
    def play(rank: int, group) -> None:
        construct(rank, group, timeout_s=0.3).dispatch_send(*arguments())

    errors = together(4, Notes(), play, ranks=[0, 1, 3])
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], ExchangeTimeout) and errors[rank].half == "dispatch_send", errors
    first = [error for error in (errors[0], errors[1], errors[3]) if "nothing within 0.3 s" in error.seen]
    assert first and first[0].peer == 2 and first[0].expected == "its call of dispatch_send"


def test_what_does_not_fit_is_told_to_all():
    errors = together(4, Notes(most_blocks=3), lambda rank, group: construct(rank, group).dispatch_send(*arguments()))
    assert all(isinstance(error, CommError) and "4 virtual ranks do not fit" in str(error) for error in errors), errors


def test_ranks_agree_on_what_is_returned():
    def play(rank: int, group) -> None:
        construct(rank, Nvshmem(group, returns="f32" if rank == 3 else "rows"))

    errors = [error for error in together(4, Notes(), play) if error is not None]
    said = re.compile(r"returns is '(rows|f32)' on rank \d but '(rows|f32)' on rank \d: ")
    assert errors and all(isinstance(e, ConfigError) and said.match(str(e)) for e in errors), errors
