"""`musejax bench limits` without a GPU: table and JSON from canned rows, names of groups, refusals."""

import json
import re
import sys

import jax
import pytest

from musejax import cli, ffi
from musejax.bench import limits

ROWS = {
    "hbm": [dict(name="hbm.steady", what="HBM read, bulk-copy ring, steady", unit="TB/s", figure=4.571, low=4.55,
                 high=4.58, repeats=15, design="4.57", note="4.98 GB", status="ok"),
            dict(name="hbm.clock", what="SM clock meanwhile", unit="GHz", figure=1.98, low=1.97, high=1.98, repeats=15,
                 design="", note="", status="ok")],
    "tear": [dict(name="tear.local", what="torn 16-byte words, between SMs", unit="wrong", figure=0.0, low=0.0,
                  high=0.0, repeats=1, design="0", note="of 1e+09", status="ok")],
    "peer": [dict(name="peer.flag", what="flag to the other GPU, one way", unit="us", figure=0.0, low=0.0, high=0.0,
                  repeats=0, design="0.67", note="needs 2 GPUs", status="skipped")],
}
FAILED = dict(name="gather", what="gather", unit="", figure=0.0, low=0.0, high=0.0, repeats=0, design="",
              note="device 0: waited 2 s for a tagged word", status="failed")


class Library:
    """Stands in for the CUDA library; `asked` is what it was asked for."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def limits(self, device, groups):
        self.asked.append((device, tuple(groups)))
        return [row for group in groups for row in self.rows.get(group, [])]

    def version(self):
        return "1.2.3"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `bench limits` with canned rows -> (exit code, stdout, stderr); `run.library` was asked."""

    def call(*argv, rows=ROWS):
        call.library = Library(rows)
        monkeypatch.setattr(limits, "open_library", lambda: (call.library, "NVIDIA H200"))
        code = cli.main(["bench", "limits", *map(str, argv)])
        return code, *capsys.readouterr()

    return call


def test_table(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("NVIDIA H200") and lines[2] == limits.COLUMNS
    assert [line.split("  ")[0] for line in lines[3:7]] == [
        row["what"] for rows in ROWS.values() for row in rows]
    steady, clock, tear, peer = lines[3:7]
    assert re.search(r" 4\.57 TB/s +4\.55 to 4\.58  4\.57 +4\.98 GB$", steady)
    assert re.search(r" 1\.98 GHz +1\.97 to 1\.98  -$", clock)
    assert re.search(r" 0 wrong +-  0 +of 1e\+09$", tear), "counts are whole numbers"
    assert re.search(r" - us +-  0\.67 +needs 2 GPUs$", peer), "what was not measured has no figure"
    assert lines[-1].startswith("4 rows")
    starts = {line.index(unit) for line, unit in zip(lines[3:7], ("TB/s", "GHz", "wrong", "us "), strict=True)}
    assert starts == {limits.COLUMNS.index("unit")}


def test_groups_are_measured_one_by_one(run):
    run()
    assert run.library.asked == [(0, (group,)) for group in limits.GROUPS]
    run("--only", "tear", "hbm")
    assert run.library.asked == [(0, ("tear",)), (0, ("hbm",))]


def test_json(run, tmp_path):
    file = tmp_path / "limits.json"
    assert run("--json", file)[0] == 0
    result = json.loads(file.read_text())
    assert result["rows"] == [row for rows in ROWS.values() for row in rows]
    assert (result["device"], result["version"], result["failed"]) == ("NVIDIA H200", "1.2.3", 0)
    assert result["seconds"] >= 0


def test_a_failed_row_fails_the_command(run, tmp_path):
    file = tmp_path / "limits.json"
    code, out, _ = run("--json", file, rows={**ROWS, "gather": [FAILED]})
    assert code == 1
    assert "FAILED: device 0: waited 2 s for a tagged word" in out and "1 of 5 rows failed" in out
    assert json.loads(file.read_text())["failed"] == 1


def test_what_the_library_refuses(run, monkeypatch):
    def refuse(self, device, groups):
        raise RuntimeError("bench limits: expected a GPU, got none: no CUDA-capable device is detected")

    monkeypatch.setattr(Library, "limits", refuse)
    code, _, err = run()
    assert code == 2 and err == (
        "musejax: error: bench limits: expected a GPU, got none: no CUDA-capable device is detected\n")


def refused(capsys, *argv):
    """Exit code 2 and one message; the message."""
    code = cli.main(["bench", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("musejax: error: ") and err.count("\n") == 1, (code, out, err)
    return err


def test_without_a_cuda_build(capsys, monkeypatch):
    monkeypatch.setattr(ffi, "_loaded", {})
    monkeypatch.setitem(sys.modules, "musejax._cuda", None)
    err = refused(capsys, "limits")
    assert "expected the library musejax._cuda" in err and "MUSEJAX_CUDA=ON pip install ." in err


def test_without_a_gpu(capsys, monkeypatch):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    monkeypatch.setattr(ffi, "library", lambda platform: Library(ROWS))
    assert "bench limits: expected a GPU that JAX can use, got none" in refused(capsys, "limits")


def test_wrong_arguments(capsys, tmp_path):
    assert "invalid choice: 'ram'" in refused(capsys, "limits", "--only", "hbm", "ram")
    assert "expected at least one argument" in refused(capsys, "limits", "--only")
    assert "MEASUREMENT" in refused(capsys)
    missing = tmp_path / "none" / "limits.json"
    assert f"--json {missing}: expected a file in a folder that exists" in refused(capsys, "limits", "--json", missing)


def test_on_a_gpu():
    """The groups that check results, each of which also sees a fault made on purpose."""
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("no GPU here, or not asked for: JAX_PLATFORMS=cuda pytest tests/test_bench_limits.py")
    module, _ = limits.open_library()
    rows = list(limits.measure(module, ["nvfp4", "tear", "mma"]))
    assert [row for row in rows if row.status == "failed"] == []
    assert {"nvfp4.check", "tear.local", "mma.columns", "mma.subnormal"} <= {row.name for row in rows}
    with pytest.raises(limits.BenchError, match=r"expected some of hbm, .*, got ram \(argument groups\)"):
        list(limits.measure(module, ["ram"]))
    with pytest.raises(limits.BenchError, match=r"expected 0 to \d+, got 99 \(argument device\)"):
        list(limits.measure(module, ["hbm"], device=99))


def test_groups_are_those_of_the_library(repo):
    source = (repo / "ffi" / "bench" / "limits.cu").read_text()
    table = re.search(r"kGroups\[\] = \{(.*?)\};", source, re.S)[1]
    assert re.findall(r'\{"(\w+)", Measure', table) == list(limits.GROUPS)
    header = (repo / "ffi" / "bench" / "limits.h").read_text().replace("\n//", "")
    assert f"in this order: {', '.join(limits.GROUPS)}." in header


def test_rows_are_those_of_the_binding(repo):
    source = (repo / "ffi" / "bindings" / "cuda_module.cc").read_text()
    assert set(re.findall(r'fields\["(\w+)"\]', source)) == set(limits.Row.__dataclass_fields__)
