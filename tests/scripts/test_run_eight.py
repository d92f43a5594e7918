"""scripts/run_eight.sh with a stand-in for Python that notes what it is asked for, and as many GPUs as a test wants."""

import json
import os
import subprocess
import sys
from itertools import combinations

import pytest

STAND_IN = """#!{python}
import json, os, pathlib, sys
if sys.argv[1] == "-":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
note = dict(argv=sys.argv[1:], gpus=os.environ.get("CUDA_VISIBLE_DEVICES"), path=os.environ["PYTHONPATH"])
with open({notes!r}, "a") as f:
    f.write(json.dumps(note) + "\\n")
line = " ".join(sys.argv[1:])
print("line of", line)
if "--json" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text('{{"kind": "stand-in"}}')
sys.exit(any(word in line or word == note["gpus"] for word in os.environ.get("BROKEN", "").split()))
"""


@pytest.fixture
def run(repo, tmp_path):
    """`run(gpus, *arguments, broken=words)` -> (process, calls of Python, summary or None)."""

    def call(gpus, *argv, broken=""):
        notes, tools, out = tmp_path / "notes", tmp_path / "bin", tmp_path / "out"
        tools.mkdir(exist_ok=True)
        for name, text in (("stand-in", STAND_IN.format(python=sys.executable, notes=str(notes))),
                           ("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo GPU {i}: a card\n" for i in range(gpus)))):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "stand-in"),
                            "MUSEJAX_SITE": str(tmp_path), "BROKEN": broken}
        done = subprocess.run(["bash", repo / "scripts" / "run_eight.sh", out, *argv], env=env, text=True, timeout=120,
                              capture_output=True)
        calls = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        summary = out / "summary.json"
        return done, calls, json.loads(summary.read_text()) if summary.exists() else None

    return call


def pairs_of(calls):
    return [tuple(map(int, c["gpus"].split(","))) for c in calls if "limits" in c["argv"]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_stages(run, tmp_path, ranks):
    done, calls, summary = run(ranks, str(ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(c["path"] == str(tmp_path) for c in calls)
    pairs = pairs_of(calls)
    assert sorted(pairs) == list(combinations(range(ranks), 2))
    for first in range(0, len(pairs), ranks // 2):  # a round
        assert sorted(i for pair in pairs[first:first + ranks // 2] for i in pair) == list(range(ranks))
    assert [c["gpus"] for c in calls if "tear" in c["argv"]] == [f"0,{ranks - 1}"]
    steps = [c["argv"] for c in calls if "step" in c["argv"]]
    layers = "62" if ranks == 8 else "8"
    assert len(steps) == 4 and all(a[a.index("--layers") + 1] == layers for a in steps)
    assert all(a[a.index("--devices") + 1] == str(ranks) for a in steps)
    soak = calls[-1]["argv"]
    assert soak[soak.index("--steps") + 1] == ("100000" if ranks == 8 else "4096") and "--reference" in soak
    assert [s["name"] for s in summary["stages"]] == [
        "peers", "bits", "layer", "step-d49-c2048", "step-d49-c32768", "step-d102-c2048", "step-d102-c32768", "soak"]
    assert not any(s["exit_code"] for s in summary["stages"])
    assert set(summary["results"]) >= {"layer", "step-d49-c2048", "peer-0-1"}
    assert "1,109" in done.stdout and "soak: line of -P scripts/soak.py" in done.stdout


def test_one_gpu(run):
    done, calls, summary = run(1, "1", "4", "64")
    assert done.returncode == 0 and summary["ranks"] == 1
    assert not any("--devices" in c["argv"] for c in calls if "bench" in c["argv"])
    assert "64" in calls[-1]["argv"]


@pytest.mark.parametrize(("broken", "last"), [("1,2", "peers"), ("tests/gpu/test_devices.py", "bits")])
def test_what_the_rest_stands_on(run, broken, last):
    """A pair that cannot, or bits that differ: a report, and nothing more is run."""
    done, calls, summary = run(4, "4", broken=broken)
    assert done.returncode == 1 and summary["stages"][-1]["name"] == last and summary["stages"][-1]["exit_code"]
    assert "line of" in done.stdout and not any("soak" in " ".join(c["argv"]) for c in calls)


def test_a_measurement_that_fails(run):
    """The others are run all the same; the exit code says it."""
    done, _, summary = run(2, "2", broken="32768")
    assert done.returncode == 1
    assert [s["name"] for s in summary["stages"] if s["exit_code"]] == ["step-d49-c32768", "step-d102-c32768"]
    assert summary["stages"][-1]["name"] == "soak"


@pytest.mark.parametrize(("gpus", "argv", "text"), [
    (2, ("4",), "expected 4 GPUs, found 2"), (8, ("3",), "RANKS: expected 1, 2, 4 or 8, got 3"),
    (8, ("8", "63"), "LAYERS: expected 4 to 62"), (8, ("8", "62", "0"), "STEPS: expected 1 or more"),
    (8, ("8", "62", "1", "more"), "got 5 arguments")])
def test_refusals(run, gpus, argv, text):
    done, calls, _ = run(gpus, *argv)
    assert done.returncode == 2 and text in done.stderr and not calls
