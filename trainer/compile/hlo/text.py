"""HLO text, as the TPU compiler prints it after optimisation, as computations of instructions.

Only what counting needs is taken apart: names, opcodes, shapes, operands. The rest of a line is kept as text and
searched when someone asks; a module of 20 MB is read in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache

_BITS = {"pred": 8, "token": 0, "opaque": 0, "e": 0}
_DTYPE_BITS = re.compile(r"[a-z]+?(\d+)")
_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_NAME = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_OPERAND = re.compile(r"%([^\s,()]+)")
_SPACE = re.compile(r"S\((\d+)\)")


_HBM, _HOST = 0, 5  # memory spaces, as a layout's S(n) tells them


@dataclass(frozen=True)
class Leaf:
    """One array of a shape: dtype, dimensions, the memory space that its layout names (0: HBM, 1: VMEM, 5: host)."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Unpadded."""
        return -(-self.elements * dtype_bits(self.dtype) // 8)

    @property
    def hbm_bytes(self) -> int:
        """Unpadded; 0 if it lives elsewhere."""
        return self.bytes if self.space == _HBM else 0

    @property
    def host_bytes(self) -> int:
        return self.bytes if self.space == _HOST else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@cache
def dtype_bits(dtype: str) -> int:
    """Bits an element takes in memory: ``bf16`` 16, ``f8e4m3fn`` 8, ``pred`` 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = _DTYPE_BITS.match(dtype)
    return int(match[1]) if match else 0


@lru_cache(maxsize=65536)
def leaves(shape: str) -> tuple[Leaf, ...]:
    """The arrays of a shape's text, in order: one, or a tuple's, nested ones flattened."""
    found = []
    for dtype, dims, layout in _LEAF.findall(shape):
        space = _SPACE.search(layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found.append(Leaf(dtype, sizes, int(space[1]) if space else _HBM))
    return tuple(found)


@dataclass(slots=True)
class Instruction:
    """One line: ``%name = shape opcode(operands), attributes``."""

    name: str
    opcode: str
    shape: str
    operands: list[str]
    arguments: str  # what stands between the parentheses
    attributes: str
    root: bool

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves(self.shape)

    def attribute(self, pattern: str) -> str | None:
        """The first group of ``pattern`` in the attributes, None if it isn't there."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def called(self) -> str | None:
        """The computation that a fusion, call, async start or reduction names."""
        return self.attribute(r"(?:calls|to_apply|called_computations)=\{?%?([^\s,}]+)")

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def order(self) -> dict[str, int]:
        """Name → position, which is the schedule's."""
        return {i.name: position for position, i in enumerate(self.instructions)}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions


def parse(text: str) -> Module:
    """Read a module's text.

    Raises:
        ValueError: there is no ENTRY computation in it.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line.startswith(" "):
            if current is not None and (instruction := _instruction(line)) is not None:
                current.instructions.append(instruction)
        elif (header := _HEADER.match(line)) and not line.startswith("HloModule"):
            current = computations[header[2]] = Computation(header[2])
            if header[1]:
                entry = current
    if entry is None:
        raise ValueError("no ENTRY computation: not the text of an HLO module")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opened = line.find("(", end)
    closed = _closing(line, opened)
    arguments = line[opened + 1 : closed]
    return Instruction(
        name=match[2],
        opcode=line[end + 1 : opened],
        shape=line[start:end],
        operands=_OPERAND.findall(arguments),
        arguments=arguments,
        attributes=line[closed + 1 :],
        root=bool(match[1]),
    )


_PARENTHESIS = re.compile(r"[()]")


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes; the line's end if it doesn't."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
