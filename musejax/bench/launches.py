"""How many launches a compiled program makes, counted in the text of its optimised HLO."""

from __future__ import annotations

import re
from typing import NamedTuple

from musejax.bench.limits import BenchError

QUIET = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier",
                   "async-done", "copy-done", "all-gather-done", "partition-id", "replica-id"})
"""Instructions for which a GPU runs nothing, or nothing beside the one that started them."""

KERNELS = {"musejax_head": 3}
"""FFI targets that launch more than one kernel: of the head (ffi/head/head.cu) norms, product and the largest."""

_CALLED = {"call": ("to_apply",), "async-start": ("calls",), "while": ("condition", "body")}
"""Instructions that launch what other computations say, and the attributes that name those. XLA puts stretches of a
program into computations of their own, such as those of CUDA graphs."""

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?[\w.\-]+ = (.*)")
_OPERATION = re.compile(r"([a-z][\w\-]*)\(")


class Launches(NamedTuple):
    """What a program launches.

    Attributes:
        count: kernels and copies, those of a loop's body and condition once.
        loop: whether there is a loop, which the host drives turn by turn.
    """

    count: int
    loop: bool


class _Instruction(NamedTuple):
    operation: str
    text: str

    def attribute(self, name: str) -> str:
        found = re.search(rf'\b{name}="?%?([\w.\-]+)', self.text)
        if found is None:
            raise BenchError(f"compiled program: expected {name}= in an instruction {self.operation}, got {self.text}")
        return found[1]


def count_launches(hlo: str) -> Launches:
    """Of the entry computation of an HLO module, as `compiled.as_text()` prints it. A fusion, a copy, a sort and so on
    are one launch each, an FFI call one or what `KERNELS` says.

    Raises:
        BenchError: the text is not such a module.
    """
    computations, entry = _computations(hlo)

    def launches(name: str) -> Launches:
        count, loop = 0, False
        for instruction in computations[name]:
            operation = instruction.operation
            if operation in _CALLED:
                inner = [launches(instruction.attribute(attribute)) for attribute in _CALLED[operation]]
                count += sum(x.count for x in inner)
                loop = loop or operation == "while" or any(x.loop for x in inner)
            elif operation == "custom-call":
                count += KERNELS.get(instruction.attribute("custom_call_target"), 1)
            else:
                count += operation not in QUIET
        return Launches(count, loop)

    return launches(entry)


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Instructions of every computation by its name, and the entry's name."""
    computations, entry, here = {}, None, None
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            here = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            here = None
        elif here is not None:
            here.append(_instruction(line))
    if entry is None:
        raise BenchError("compiled program: expected an HLO module with an entry computation, got none")
    return computations, entry


def _instruction(line: str) -> _Instruction:
    """From `%name = type operation(operands), attributes`."""
    found = _INSTRUCTION.match(line.strip())
    operation = found and _OPERATION.match(_after_type(found[1]))
    if not operation:
        raise BenchError(f"compiled program: expected an instruction, got {line.strip()[:120]}")
    return _Instruction(operation[1], found[1])


def _after_type(text: str) -> str:
    """What follows the type: a word, or a tuple in parentheses."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == " " and depth == 0:
            return text[i + 1:]
    return ""
