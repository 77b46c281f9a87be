"""Parser of the HLO text that the TPU compiler prints after optimisation.

Attributes stay text until one is asked for, so a module of 20 MB is read in seconds.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

HBM, HOST = 0, 5  # memory spaces, as a layout's S(n) names them; 1 is VMEM

_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_NAME = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_OPERAND = re.compile(r"%([^\s,()]+)")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r", (?:calls|to_apply|body|(?:called|branch|true|false)_computations?)=(\{[^}]*\}|[^\s,]+)")
_PARENTHESIS = re.compile(r"[()]")


@dataclass(frozen=True)
class Leaf:
    """One array of a shape; ``space`` is its memory: :data:`HBM`, :data:`HOST` or another. Sizes are unpadded."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.elements * dtype_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@lru_cache(maxsize=256)
def dtype_bits(dtype: str) -> int:
    """Bits of an element in memory: 16 for ``bf16``, 8 for ``f8e4m3fn`` and ``pred``, 0 for a token."""
    if dtype == "pred":
        return 8
    match = re.match(r"[a-z]+?(\d+)", dtype)
    return int(match[1]) if match else 0


@lru_cache(maxsize=65536)
def leaves(shape: str) -> tuple[Leaf, ...]:
    """The arrays of a shape's text, in order; nested tuples are flattened."""
    found = []
    for dtype, dims, layout in _LEAF.findall(shape):
        space = _SPACE.search(layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found.append(Leaf(dtype, sizes, int(space[1]) if space else HBM))
    return tuple(found)


@dataclass(slots=True, eq=False)
class Instruction:
    """One line of ``computation``: ``%name = shape opcode(arguments), attributes``.

    ``names`` are those of its operands, among the arguments.
    """

    computation: Computation = field(repr=False)
    name: str
    opcode: str
    shape: str
    names: list[str]
    arguments: str
    attributes: str
    root: bool

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves(self.shape)

    @property
    def operands(self) -> list[Instruction]:
        known = self.computation.by_name
        return [known[name] for name in self.names if name in known]

    @property
    def inputs(self) -> list[Leaf]:
        """The arrays of all operands."""
        return [leaf for operand in self.operands for leaf in operand.leaves]

    @property
    def users(self) -> list[Instruction]:
        return self.computation.users.get(self.name, [])

    @property
    def later(self) -> list[Instruction]:
        """The instructions behind it in the schedule."""
        return self.computation.instructions[self.computation.order[self.name] + 1 :]

    @property
    def called(self) -> list[Computation]:
        """The computations that a fusion, call, async start, loop (its body) or conditional (its branches) runs."""
        found = " ".join(_CALLED.findall(self.attributes))
        return [self.computation.module[name] for name in re.findall(r"[^\s,{}%]+", found)]

    def attribute(self, pattern: str) -> str | None:
        """The first group of ``pattern`` in the attributes, None without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclass(eq=False)
class Computation:
    """A function of the ``module`` (name → computation): its instructions in the order of the schedule."""

    name: str
    module: dict[str, Computation] = field(repr=False)
    entry: bool  # the one that the module runs
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def order(self) -> dict[str, int]:
        """Instruction's name → its position in the schedule."""
        return {i.name: position for position, i in enumerate(self.instructions)}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Number of a parameter → its instruction."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction's name → the instructions that take it as an operand."""
        users = defaultdict(list)
        for instruction in self.instructions:
            for name in instruction.names:
                users[name].append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.root), self.instructions[-1])


def parse(text: str) -> Computation:
    """Reads a module's text, and returns the computation that it runs; raises ValueError if it has no ENTRY."""
    module: dict[str, Computation] = {}
    current = None
    for line in text.splitlines():
        if line.startswith(" "):
            if current is not None and (instruction := _instruction(current, line)):
                current.instructions.append(instruction)
        elif (header := _HEADER.match(line)) and not line.startswith("HloModule"):
            current = module[header[2]] = Computation(header[2], module, entry=bool(header[1]))
    for computation in module.values():
        if computation.entry:
            return computation
    raise ValueError("no ENTRY computation: not the text of an HLO module")


def _instruction(computation: Computation, line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opened = line.find("(", end)
    closed = _closing(line, opened)
    arguments = line[opened + 1 : closed]
    return Instruction(
        computation,
        name=match[2],
        opcode=line[end + 1 : opened],
        shape=line[start:end],
        names=_OPERAND.findall(arguments),
        arguments=arguments,
        attributes=line[closed + 1 :],
        root=bool(match[1]),
    )


def _closing(line: str, start: int) -> int:
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
