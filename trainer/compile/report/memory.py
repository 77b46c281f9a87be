"""HBM of a compiled step, from the compiler's statistics, its buffer assignment, or its out-of-memory error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwright.compile.hlo.communication import module_of
from shardwright.compile.hlo.text import Computation, Instruction, Module, leaves
from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.report.units import parse_size

LARGEST = 20  # buffers in a report
_LOOK_BACK = 8  # instructions back from a buffer, at most, to one whose metadata names a module
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_ALIVE = re.compile(r"^ +(\S+?)\{([\d,]*)\}: (\d+) bytes", re.MULTILINE)


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers; ``module``: the module or argument that it belongs to."""

    bytes: int
    shape: str
    module: str
    name: str


@dataclass(frozen=True)
class MemorySizes:
    """Bytes a chip.

    Args:
        peak_bytes: the most alive at once, by the compiler; if the step does not fit, ``required_bytes``.
        required_bytes: free bytes needed to load and run the step: arguments, outputs that take no argument's place,
            and the heap of temporaries with its gaps. By this number the compiler refuses a step.
        argument_bytes: weights_bytes + optimizer_bytes + batch_bytes + other_bytes.
        alias_bytes: outputs that take the place of arguments.
        temp_bytes: the heap of temporaries.
        compiler_temp_bytes: temporaries by the compiler's statistics, which can exceed the heap.
        host_temp_bytes, host_argument_bytes: in the host's memory (offloaded).
    """

    peak_bytes: int
    required_bytes: int
    argument_bytes: int
    weights_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    other_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    compiler_temp_bytes: int
    code_bytes: int
    host_temp_bytes: int
    host_argument_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's refusal, in bytes; numbers that it leaves out are 0.

    Args:
        used: the step's bytes in all.
        limit: usable bytes.
        program: temporaries.
        shared: outputs that take the place of arguments.
        buffers: the largest, in the compiler's order.
    """

    used: int
    limit: int
    program: int
    arguments: int
    outputs: int
    shared: int
    buffers: tuple[Buffer, ...]


def memory_of(
    result: dict[str, Any], buffers: str, lowered: LoweredGraph
) -> tuple[MemorySizes, int, tuple[Buffer, ...]]:
    """(sizes of a step, usable HBM, largest buffers) from the compiling process's ``result`` and allocations.

    The last two are those of the error if the step does not fit, else 0 and none.
    """
    heap, kinds = _assigned(buffers, lowered)
    if "error" in result:
        refusal = parse_out_of_memory(result["error"])
        return _refused_sizes(refusal, heap, kinds), refusal.limit, refusal.buffers
    arguments, outputs, alias = result["argument"], result["output"], result["alias"]
    temp = heap or result["temp"]
    required = arguments + temp + max(outputs - alias, 0)
    # with temporaries on the host the compiler's peak counts those too
    peak = required if result["host_temp"] else result["peak"]
    sizes = MemorySizes(
        peak_bytes=peak,
        required_bytes=max(peak, required),
        argument_bytes=arguments,
        **_by_kind(kinds, arguments),
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=temp,
        compiler_temp_bytes=result["temp"],
        code_bytes=result["generated_code"],
        host_temp_bytes=result["host_temp"],
        host_argument_bytes=result["host_argument"],
    )
    return sizes, 0, ()


def _refused_sizes(refusal: OutOfMemory, heap: int, kinds: dict[str, int]) -> MemorySizes:
    """The larger of the error's numbers, which are rounded, and of the allocations before it."""
    arguments = max(sum(kinds.values()), refusal.arguments)
    temp = max(heap, refusal.program)
    required = max(temp + arguments + refusal.outputs - refusal.shared, refusal.used)
    return MemorySizes(
        peak_bytes=required,
        required_bytes=required,
        argument_bytes=arguments,
        **_by_kind(kinds, arguments),
        output_bytes=refusal.outputs,
        alias_bytes=refusal.shared,
        temp_bytes=temp,
        compiler_temp_bytes=refusal.program,
        code_bytes=0,
        host_temp_bytes=0,
        host_argument_bytes=0,
    )


def _by_kind(kinds: dict[str, int], arguments: int) -> dict[str, int]:
    """Fields of `MemorySizes` that divide ``arguments`` bytes by kind; bytes without an allocation are ``other``."""
    known = {kind: kinds[kind] for kind in ("weights", "optimizer", "batch")}
    return {f"{kind}_bytes": count for kind, count in (known | {"other": arguments - sum(known.values())}).items()}


def _assigned(buffers: str, lowered: LoweredGraph) -> tuple[int, dict[str, int]]:
    """(bytes of the temporaries' heap, kind → bytes of arguments), both in HBM."""
    kinds = {"weights": 0, "optimizer": 0, "batch": 0, "other": 0}
    heap = 0
    for size, rest in _ALLOCATION.findall(buffers):
        if "color " in rest:  # another memory: HBM has no color
            continue
        parameter = re.search(r"parameter (\d+)", rest)
        if parameter and int(parameter[1]) < len(lowered.arguments):
            kinds[lowered.arguments[int(parameter[1])].kind] += int(size)
        elif "preallocated-temp" in rest:
            heap += int(size)
    return heap, kinds


def largest_buffers(lowered: LoweredGraph, module: Module | None, buffers: str) -> tuple[Buffer, ...]:
    """The largest buffers in HBM at the peak; none without a module."""
    if module is None:
        return ()
    homes = {i.name: (computation, i) for computation in module.computations.values() for i in computation.instructions}
    found = []
    for name, index, size in _ALIVE.findall(buffers):
        home, instruction = homes.get(name, (None, None))
        parts = instruction.leaves if instruction else ()
        number = int(index.split(",")[0]) if index else 0
        leaf = parts[number] if number < len(parts) else None
        if leaf is not None and leaf.space != 0:
            continue
        owner = _owner(lowered, module, home, instruction) if home and instruction else ""
        found.append(Buffer(int(size), str(leaf) if leaf else "", owner or name, name))
    return tuple(sorted(found, key=lambda b: -b.bytes)[:LARGEST])


def _owner(lowered: LoweredGraph, module: Module, home: Computation, instruction: Instruction | None) -> str:
    """The module in an instruction's metadata, or the argument that it is; else its first operand's."""
    for _ in range(_LOOK_BACK):
        if instruction is None:
            break
        if instruction.opcode == "parameter":
            return lowered.arguments[int(instruction.arguments)].name if home is module.entry else ""
        if owner := module_of(instruction.op_name):
            return owner
        instruction = home.by_name.get(instruction.operands[0]) if instruction.operands else None
    return ""


def is_out_of_hbm(error: str) -> bool:
    """Did the step not fit, rather than fail? A kernel that asks for too much VMEM is RESOURCE_EXHAUSTED too."""
    return "RESOURCE_EXHAUSTED" in error and re.search(r"memory space hbm|space=hbm", error) is not None


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Reads libtpu's RESOURCE_EXHAUSTED: a table of allocations, with two decimals, or the one that failed."""
    used = re.search(r"Used (\S+) of (\S+) hbm", message)
    single = re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)", message)
    if used is None and single is not None:
        shape = re.search(r"shape = '([^']*)'", message)
        tag = re.search(r"tag = '(?:output of )?([^'@]*)", message)
        name = tag[1] if tag else ""
        size = int(single[1])
        buffer = Buffer(size, _bare(shape[1]) if shape else "", name, name)
        return OutOfMemory(size, int(single[2]), size, 0, 0, 0, (buffer,))
    outputs = re.search(r"Output size (\S+); shares (\S+) with arguments", message)
    return OutOfMemory(
        used=parse_size(used[1]) if used else 0,
        limit=parse_size(used[2]) if used else 0,
        program=_row(message, "program"),
        arguments=_row(message, "arguments"),
        outputs=parse_size(outputs[1]) if outputs else 0,
        shared=parse_size(outputs[2].rstrip(".")) if outputs else 0,
        buffers=tuple(_buffer(block) for block in re.split(r"\n\s+\d+\. Size: ", message)[1:]),
    )


def _buffer(block: str) -> Buffer:
    """Reads a buffer's paragraph in the message."""

    def field(pattern: str) -> str:
        match = re.search(pattern, block)
        return match[1] if match else ""

    name = field(r"XLA label: (.+?)(?: =|\n|$)")
    module = module_of(field(r'op_name="([^"]*)"'))
    return Buffer(parse_size(block.split()[0]), _bare(field(r"Shape: (\S+)")), module or name, name)


def _row(message: str, what: str) -> int:
    """Bytes in the row ``what`` of the message's table, 0 if it has none."""
    match = re.search(rf"^\s+{what}\s+(\S+)\s*$", message, re.MULTILINE)
    return parse_size(match[1]) if match else 0


def _bare(shape: str) -> str:
    """A shape's text without layouts."""
    return ", ".join(map(str, leaves(shape))) or shape
