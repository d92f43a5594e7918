"""Fails if the layer kernel spills more registers than it is known to: python check_spills.py BUILD_LOG.

The kernel's files are ffi/layer/instance_*.cu. The log is ninja's, of a build with `-Xptxas=-v`: a line `[2/9] ...
NAME.cu...` before each file's report. A file without a report fails, too, so that a changed log format cannot pass
unseen. Prints what it found, a line a file.
"""

import re
import sys
from pathlib import Path

MOST = 120
"""Bytes of spill stores that all functions of a file may have together, a card. The aim is 0: what is left are
addresses and loop states that live across calls, outside the loops over weights."""


def reports(log: str) -> dict[str, list[tuple[str, int]]]:
    """File name -> (function, bytes of spill stores) for each function and card."""
    found: dict[str, list[tuple[str, int]]] = {}
    file = function = ""
    for line in log.splitlines():
        if re.match(r"\s*\[\d+/\d+\]", line):
            source = re.search(r"([^/\s]+\.cu)\b", line)
            file = source[1] if source else ""
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes spill stores", line):
            found.setdefault(file, []).append((function, int(match[1])))
    return found


def main() -> None:
    found = reports(Path(sys.argv[1]).read_text())
    bad = []
    for file in sorted(path.name for path in Path("ffi").rglob("instance_*.cu")):
        if file not in found:
            bad.append(f"{file}: no ptxas report in the log")
            continue
        cards = max(sum(name == function for name, _ in found[file]) for function, _ in found[file])
        stores = sum(stores for _, stores in found[file])
        line = f"{file}: {stores} bytes of spill stores on {cards} card(s)"
        print(line)
        if stores > MOST * cards:
            worst, most = max(found[file], key=lambda x: x[1])
            bad.append(f"{line}, expected at most {MOST} a card; the most in {worst}: {most}")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
