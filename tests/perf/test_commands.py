"""The verbs: their keys, their streams, their exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moelab import cli
from moelab.stages import CATEGORIES

STUDY = "predict --gpu h100 --dp 128 --tp 1 --batch 128 --kv-len 5000 --draft-tokens 1 --acceptance 0.6".split()


@pytest.fixture
def moelab(capsys, tmp_path, monkeypatch):
    """moelab("verb", ...) -> (exit status, standard output, standard error); no records of one's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(x) for x in arguments])
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return call


def test_predict_has_the_keys(moelab):
    status, out, err = moelab(*STUDY, "--overlap", "microbatch", "--alltoall", "pplx-2025", "--json")
    found = json.loads(out)
    assert status == 0 and err == ""
    assert {"step_ms", "tok_s_per_request", "tok_s_per_gpu", "tok_s_per_node", "layer_us", "memory_bytes", "fits",
            "interval", "origins"} <= set(found)  # fmt: skip
    assert found["layer_us"]["total"] == pytest.approx(1896, rel=0.05)
    assert set(CATEGORIES) < set(found["layer_us"]) and found["fits"] is True
    assert found["interval"]["step_ms"][0] < found["step_ms"] < found["interval"]["step_ms"][1]
    for origin in found["origins"].values():
        assert set(origin) == {"ms", "origin", "error", "source"}


def test_predict_of_a_layer_alone(moelab):
    found = json.loads(moelab(*STUDY, "--overlap", "none", "--alltoall", "pplx-2025", "--layer-only", "--json")[1])
    assert found["layer_us"]["total"] == pytest.approx(2667, rel=0.05)
    assert "step_ms" not in found and "memory_bytes" not in found and "host" not in found["origins"]
    assert found["interval"]["layer_us"][0] < found["layer_us"]["total"] < found["interval"]["layer_us"][1]


def test_every_flag_reaches_the_model(moelab):
    words = ("predict --gpu h200 --dp 9 --tp 8 --ep 72 --batch 7.5 --kv-len 1382 --draft-tokens 2 --acceptance 0.8,0.5 "
             "--overlap dispatch --fabric efa --alltoall pplx-garden --imbalance 1.2 --redundant-experts 32 "
             "--kv-dtype fp8 --capacity 141e9 --reserve 0.1 --json").split()  # fmt: skip
    found = json.loads(moelab(*words)[1])
    assert found["deployment"] == {
        "gpu": "H200", "dp": 9, "tp": 8, "ep": 72, "batch": 7.5, "kv_len": 1382, "draft_tokens": 2,
        "acceptance": [0.8, 0.5], "overlap": "dispatch", "fabric": "efa", "alltoall": "pplx-garden", "imbalance": 1.2,
        "redundant_experts": 32,
    }  # fmt: skip
    assert found["memory_bytes"]["capacity"] == 141e9 and found["memory_bytes"]["reserve"] == pytest.approx(14.1e9)
    cut = json.loads(moelab(*"predict --gpu h200 --dp 1 --tp 8 --ep 1 --batch 4 --kv-len 1382 --json".split())[1])
    assert cut["deployment"]["ep"] == 1 and cut["layer_us"]["Dispatch"] == 0


def test_what_does_not_fit_is_answered(moelab):
    words = "predict --gpu h200 --dp 8 --tp 1 --batch 128 --kv-len 5000 --draft-tokens 1 --acceptance 0.6".split()
    status, out, _ = moelab(*words, "--json")
    found = json.loads(out)
    assert status == 0 and found["fits"] is False and 80 <= found["largest_batch"] < 110
    assert "DOES NOT FIT" in moelab(*words)[1]


def test_outside_what_was_measured_is_said(moelab):
    found = json.loads(moelab(*"predict --gpu gb200 --dp 64 --batch 64 --kv-len 60000 --json".split())[1])
    assert any("outside what was measured" in note for note in found["notes"])
    assert found["origins"]["MLA"]["origin"] == "extrapolated"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu h300 --dp 8 --batch 1 --kv-len 1", "unknown GPU 'h300'; did you mean"),
        ("--gpu h100 --dp 72 --batch 1 --kv-len 1", "nearest legal: ep 64, or 32 redundant experts"),
        ("--gpu h100 --dp 8 --batch 1 --kv-len -1", "kv_len is -1.0: legal is 1 or more tokens; nearest: 1"),
        ("--gpu h100 --dp 8 --tp 3 --batch 1 --kv-len 1", "nearest: 2"),
        ("--gpu h100 --dp 8 --ep 4 --batch 1 --kv-len 1", "nearest legal: ep 8"),
        ("--gpu h100 --dp 8 --batch 1 --kv-len 1 --overlap micro", "nearest: microbatch"),
        ("--gpu h100 --dp 8 --batch 1 --kv-len 1 --acceptance high", "as 0.6 or 0.8,0.6"),
        ("--dp 8 --batch 1 --kv-len 1", "give --gpu"),
        ("--scenario eagle", "did you mean eagle-tree"),
        ("--gpu h100 --dp 8 --batch 1 --kv-len 1 --records /no/such", "no folder /no/such"),
        ("--gpu h100 --dp x --batch 1 --kv-len 1", "--dp"),
    ],
)  # fmt: skip
def test_impossible_requests_are_wrong_usage_in_one_line(moelab, words, message):
    status, out, err = moelab("predict", *words.split())
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_a_scenario_is_a_starting_point(moelab):
    found = json.loads(moelab("predict", "--scenario", "gb200-nvl72", "--batch", "16", "--json")[1])
    assert found["deployment"]["dp"] == 72 and found["deployment"]["batch"] == 16 and found["assumes"]


def test_plan(moelab):
    words = "plan --gpus 8xH200 --kv-len 4000 --min-speed 20 --price-per-gpu-hour 3.5 --top 2".split()
    status, out, err = moelab(*words, "--json")
    found = json.loads(out)
    assert status == 0 and err == "" and found["ranked_by"] == "USD per million tokens"
    first = found["ranked"][0]
    assert first["rank"] == 1 and first["tok_s_per_request"] >= 20 and first["bound_by"]["term"] == "GroupGEMM"
    assert {c["factor"] for c in found["what_would_change_it"]} == {0.9, 1.1}
    assert "what would change it" in moelab(*words)[1]
    for bad, message in (("8xH100", "nothing of 8xH100"), ("8H200", "write a number and a GPU")):
        status, out, err = moelab("plan", "--gpus", bad, "--kv-len", "4000", "--min-speed", "20")
        assert status == 2 and out == "" and message in err and err.count("\n") == 1


def test_validate_and_calibrate(moelab, tmp_path):
    found = json.loads(moelab("validate", "--json")[1])
    assert found["classes"]["deployment"]["median_abs_error"] < 0.10
    assert "Nothing is tuned" in found["statement"] and len(found["leave_one_source_out"]) == 10
    row = next(r for r in found["rows"] if r["id"] == "trtllm-h100-ep16-1k1k-b4")
    assert "host-driven exchange" in row["causes"] and abs(row["error"]) < 0.25 < abs(row["error_before_causes"])
    assert "passed over" in moelab("validate")[1]
    points = tmp_path / "mine.csv"
    points.write_text("id,engine,gpu,ep,dp,tp,batch_per_gpu,kv_len,step_ms\nmine,SGLang,H200,8,8,1,8,7834,34.7\n")
    mine = json.loads(moelab("validate", "--points", points, "--json")[1])
    assert [r["id"] for r in mine["rows"]] == ["mine"] and mine["rows"][0]["error"] is not None
    assert moelab("validate", "--points", tmp_path / "no.csv")[0] == 2
    status, out, _ = moelab("calibrate", "--json")
    assert status == 0 and len(json.loads(out)["published"]) == 12
    assert "beta GB/s" in moelab("calibrate")[1]


def test_predicting_loads_neither_torch_nor_pandas():
    code = (
        "import sys; from moelab.perf import predict\n"
        "predict('h100', 64, batch=8, kv_len=100)\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
