"""The layer kernel without JAX (harness.cu): its cases, and the tools of compute-sanitizer over small ones.

The tests whose names end in `emulated` run the same program on the CPU emulator, so that it is known to work, and to
see a wrong bit, wherever there is a C++ compiler.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_inputs import FFI, cxx

from musejax.nvfp4 import ACTIVATIONS

SOURCE = Path(__file__).with_name("harness.cu")
EMULATOR = FFI.parent / "tests/emulator"
BITS = ("cut", "ranks", "blocks")
FAULTS = ("silent", "epoch", "units")
SECONDS = 400
"""A run of the program takes at most these; then its own watchdog ends it."""

ELECTED = ("an mbarrier orders them, at which one lane arrives for its warp after __syncwarp, or for several after a "
           "named barrier; that racecheck gives no order to the other lanes is how we read its reports, not shown yet")

EXPLAINED_RACES = {
    (r"LoadPermuted\(|MultiplyBf16(Tiles)?<", r"CpAsyncBulk\("): f"a stage of the ring: {ELECTED}",
    (r"CpAsyncBulk\(", r"LoadPermuted\(|MultiplyBf16(Tiles)?<"): f"a stage of the ring: {ELECTED}",
    (r"Store(Sums|Tile)\(", r"DenseSums<|AddPasses\("): f"sums of ranges: {ELECTED}",
    (r"StreamUnits<", r"WriteVisits<"): f"the list of visits: {ELECTED}",
    (r"Overdue\(", r"Overdue\("): "lanes of a warp that have waited long write and read when the wait began: any of "
                                 "their times will do",
    (r"Waiter::At\(", r"Waiter::At\("): "lanes of a warp write the same numbers",
}
"""What racecheck may report: what its first access and each of the others have to match, and why it is no race."""


def cuda_tool(name: str) -> str:
    """The path of a tool of the CUDA toolkit, or skips the test."""
    compiler = os.environ.get("CUDACXX") or shutil.which("nvcc")
    toolkit = os.environ.get("CUDA_HOME", "")
    places = [str(Path(compiler).resolve().parent)] if compiler else []
    places += [os.path.join(toolkit, "bin")] if toolkit else []
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if path is None:
        pytest.skip(f"no {name}: it is not on PATH, nor beside $CUDACXX or in $CUDA_HOME/bin")
    return path


@pytest.fixture(scope="session")
def arch() -> str:
    """The architecture of the first GPU here, such as 90a."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no CUDA device: nvidia-smi is not found")
    query = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True,
                           text=True)
    found = re.match(r"(\d+)\.(\d+)", query.stdout)
    if query.returncode or not found:
        pytest.skip(f"no CUDA device: nvidia-smi says {(query.stdout + query.stderr).strip()!r}")
    return f"{found[1]}{found[2]}a"


@pytest.fixture(scope="session")
def harness(arch, tmp_path_factory) -> Path:
    """The program for the GPU here, with the flags of CMakeLists.txt."""
    program = tmp_path_factory.mktemp("harness") / "harness"
    subprocess.run([cuda_tool("nvcc"), "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}",
                    "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-lineinfo",
                    "-Xcompiler=-ffp-contract=off", f"-I{FFI}", str(SOURCE), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="session")
def emulated(tmp_path_factory) -> Path:
    """The program for the emulator."""
    if os.uname().machine != "x86_64":
        pytest.skip(f"the emulator switches fibers on x86_64 only, this is {os.uname().machine}")
    program = tmp_path_factory.mktemp("harness") / "emulated"
    subprocess.run([*cxx(), "-std=c++17", "-O2", "-ffp-contract=off", "-pthread", "-w", "-DMUSEJAX_EMULATOR",
                    f"-I{EMULATOR}", f"-I{FFI}", "-x", "c++", str(SOURCE), str(EMULATOR / "fibers.cc"), "-o",
                    str(program)], check=True)
    return program


def run(*command) -> tuple[int, str]:
    """-> (exit status, output), which is printed too."""
    done = subprocess.run([*map(str, command), "--watchdog", str(SECONDS)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=SECONDS + 60)
    print(done.stdout)
    return done.returncode, done.stdout


def assert_all_ok(*command) -> str:
    status, output = run(*command)
    assert status == 0 and "FAILED" not in output and output.count(": ok") > 1, output
    return output


def assert_all_wrong(*command) -> None:
    """Every case fails, and names where; the run that they are compared with is as it should be."""
    status, output = run(*command, "--wrong-weight", *BITS)
    first, *others = output.splitlines()
    assert status == 1 and first == "reference: ok" and others
    for line in others:
        assert re.search(r": FAILED first difference at index \d+: 0x[0-9a-f]+ != 0x[0-9a-f]+ \(", line), line


# ------------------------------------------------------------------ on a GPU


@pytest.mark.parametrize("case", [*BITS, "repeat"])
def test_same_bits(harness, case):
    assert_all_ok(harness, case)


@pytest.mark.parametrize("mode", ACTIVATIONS[1:])
def test_same_bits_of_activations(harness, mode):
    assert_all_ok(harness, "--activations", mode, *BITS)


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_reported(harness, case):
    output = assert_all_ok(harness, case)
    place = r"rank \d+, SM \d+, warp \d+, layer \d+, phase \d+, wanted \d+, saw \d+"
    assert len(re.findall(rf"{case}, \d ranks? \(\d+\.\d+ s, error 2: {place}\): ok", output)) == 2


def test_a_wrong_weight_is_seen(harness):
    assert_all_wrong(harness)


def sanitize(harness: Path, tool: str, *options: str) -> str:
    """The output of a tool of compute-sanitizer over the small cases; skips the test where it cannot run."""
    status, output = run(cuda_tool("compute-sanitizer"), "--tool", tool, *options, harness, "--small", "--one-grid",
                         "--budget-factor", "100", "--activations", "nvfp4_per_token", "cut", "ranks")
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported")
    assert status == 0 and "FAILED" not in output and output.count(": ok") > 1, output
    return output


@pytest.mark.parametrize("tool, options", [("memcheck", ("--padding", "256")),
                                           ("synccheck", ("--num-cuda-barriers", "64"))])
def test_sanitizer(harness, tool, options):
    output = sanitize(harness, tool, *options, "--error-exitcode", "9")
    assert "ERROR SUMMARY: 0 errors" in output, output


def races(output: str) -> list[str]:
    """The reports of racecheck's analysis."""
    return re.findall(r"^=+ (?:Error|Warning): Race reported .*(?:\n=+ +and .*)*", output, re.MULTILINE)


def matches(race: str, first: str, others: str) -> bool:
    head, *rest = race.splitlines()
    return bool(re.search(first, head)) and all(re.search(others, line) for line in rest)


def unexplained(output: str) -> list[str]:
    """The reports that EXPLAINED_RACES does not list.

    Raises:
        AssertionError: there is no summary, or it counts other reports than these.
    """
    found = races(output)
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    assert summary and int(summary[1]) == len(found), f"expected a summary of {len(found)} reports: {output}"
    return [race for race in found if not any(matches(race, *known) for known in EXPLAINED_RACES)]


def test_racecheck(harness):
    output = sanitize(harness, "racecheck", "--num-cuda-barriers", "64", "--print-limit", "0")
    left = unexplained(output)
    assert not left, "\n".join([f"{len(left)} reports that EXPLAINED_RACES does not list:", *left])


# ------------------------------------------------------------------ on the CPU

EMULATED = ("--small", "--budget-factor", "0.02")


def test_same_bits_emulated(emulated):
    assert_all_ok(emulated, *EMULATED, *BITS)


def test_a_wrong_weight_is_seen_emulated(emulated):
    assert_all_wrong(emulated, *EMULATED)


@pytest.mark.slow
def test_a_fault_is_reported_emulated(emulated):
    output = assert_all_ok(emulated, *EMULATED, "units")
    assert output.count("error 2: rank") == 2


RACE = """========= COMPUTE-SANITIZER
reference: ok
========= Error: Race reported between Write access at f(int)+0x140 in a.cu:41
=========     and Read access at f(int)+0xe0 in a.cu:51 [4 hazards]
=========     and Write access at f(int)+0x140 in a.cu:41 [5 hazards]
=========
========= Warning: Race reported between Read access at g(int)+0x10 in a.cu:7
=========     and Write access at h(int)+0x30 in a.cu:9 [1 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_races_are_seen(monkeypatch):
    f, g = unexplained(RACE)
    assert "a.cu:41" in f and "[5 hazards]" in f and "g(int)" not in f and "h(int)" in g
    monkeypatch.setitem(EXPLAINED_RACES, (r"f\(int\)", r"f\(int\)"), "for this test")
    assert unexplained(RACE) == [g]
    one_more = RACE.replace("Write access at f(int)+0x140 in a.cu:41 [5", "Write access at k(int)+0x20 in a.cu:90 [5")
    assert one_more != RACE and len(unexplained(one_more)) == 2  # one access of a report is not like the others
    assert unexplained("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == []
    for broken in ("", RACE.replace("SUMMARY: 2", "SUMMARY: 3")):
        with pytest.raises(AssertionError, match="expected a summary"):
            unexplained(broken)
