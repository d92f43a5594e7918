"""Fails if a file *layer_kernel*.cu below ffi/ spills registers: python check_spills.py BUILD_LOG.

The log is ninja's, of a build with `-Xptxas=-v`: a line `[2/9] ... NAME.cu...` before each file's
report. A file without a report fails, too, so that a changed log format cannot pass unseen.
"""

import re
import sys
from pathlib import Path


def reports(log: str) -> dict[str, list[tuple[str, int, int]]]:
    """File name -> (function, bytes of spill stores, of spill loads) for each function and card."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    file = function = ""
    for line in log.splitlines():
        if re.match(r"\s*\[\d+/\d+\]", line):
            source = re.search(r"([^/\s]+\.cu)\b", line)
            file = source[1] if source else ""
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found.setdefault(file, []).append((function, int(match[1]), int(match[2])))
    return found


def main() -> None:
    found = reports(Path(sys.argv[1]).read_text())
    bad = []
    for file in sorted(path.name for path in Path("ffi").rglob("*layer_kernel*.cu")):
        if file not in found:
            bad.append(f"{file}: no ptxas report in the log")
        for function, stores, loads in found.get(file, []):
            if stores or loads:
                bad.append(f"{file}: {function}: {stores} bytes spill stores, {loads} bytes spill loads")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
