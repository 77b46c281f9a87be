"""HBM of a compiled step, from the compiler's statistics, its buffer assignment, or its out-of-memory error."""

import re
from dataclasses import dataclass
from typing import Any

from shardwright.compile.hlo.communication import module_of
from shardwright.compile.hlo.text import HBM, Computation, Instruction, leaves
from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.report.units import parse_size

LARGEST = 20  # buffers in a report
_LOOK_BACK = 8  # instructions back from a buffer, at most, to one whose metadata names a module
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_ALIVE = re.compile(r"^ +(\S+?)\{([\d,]*)\}: (\d+) bytes", re.MULTILINE)


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers."""

    bytes: int
    shape: str
    module: str  # or argument, that it belongs to
    name: str


@dataclass(frozen=True)
class MemorySizes:
    """Bytes a chip."""

    peak_bytes: int  # the most alive at once, by the compiler; if the step does not fit, `required_bytes`
    # free bytes needed to load and run the step: arguments, outputs that take no argument's place, and the heap of
    # temporaries with its gaps. By this number the compiler refuses a step.
    required_bytes: int
    argument_bytes: int  # sum of the next four
    weights_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    other_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that take the place of arguments
    temp_bytes: int  # the heap of temporaries
    compiler_temp_bytes: int  # temporaries by the compiler's statistics, which can exceed the heap
    code_bytes: int
    host_temp_bytes: int  # in the host's memory (offloaded)
    host_argument_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's refusal, in bytes; numbers that it leaves out are 0."""

    used: int  # in all
    limit: int  # usable
    temp: int = 0
    argument: int = 0
    output: int = 0
    alias: int = 0  # outputs that take the place of arguments
    buffers: tuple[Buffer, ...] = ()  # the largest, in the compiler's order


def memory_of(result: dict[str, Any], buffers: str, lowered: LoweredGraph) -> tuple[MemorySizes, OutOfMemory | None]:
    """The sizes of a step, and the refusal of one that does not fit, by the compiling process and its allocations."""
    heap, kinds = _assigned(buffers, lowered)
    refusal = parse_out_of_memory(result["error"]) if "error" in result else None
    told = dict.fromkeys(("generated_code", "host_temp", "host_argument"), 0) | vars(refusal) if refusal else result
    arguments, temp, fresh = told["argument"], heap or told["temp"], told["output"] - told["alias"]
    if refusal:
        # the larger of the error's numbers, which are rounded, and of the allocations before it
        arguments, temp = max(sum(kinds.values()), arguments), max(heap, refusal.temp)
        peak = required = max(temp + arguments + fresh, refusal.used)
    else:
        required = arguments + temp + max(fresh, 0)
        # with temporaries on the host the compiler's peak counts those too
        peak = required if told["host_temp"] else told["peak"]
    weights, optimizer, batch = kinds["weights"], kinds["optimizer"], kinds["batch"]
    sizes = MemorySizes(
        peak_bytes=peak,
        required_bytes=max(peak, required),
        argument_bytes=arguments,
        weights_bytes=weights,
        optimizer_bytes=optimizer,
        batch_bytes=batch,
        other_bytes=arguments - weights - optimizer - batch,  # those without an allocation too
        output_bytes=told["output"],
        alias_bytes=told["alias"],
        temp_bytes=temp,
        compiler_temp_bytes=told["temp"],
        code_bytes=told["generated_code"],
        host_temp_bytes=told["host_temp"],
        host_argument_bytes=told["host_argument"],
    )
    return sizes, refusal


def _assigned(buffers: str, lowered: LoweredGraph) -> tuple[int, dict[str, int]]:
    """(bytes of the temporaries' heap, kind → bytes of arguments), both in HBM."""
    kinds = {"weights": 0, "optimizer": 0, "batch": 0, "other": 0}
    heap = 0
    for size, rest in _ALLOCATION.findall(buffers):
        if "color " in rest:  # another memory: HBM has no color
            continue
        parameter = _find(r"parameter (\d+)", rest)
        if parameter and int(parameter) < len(lowered.arguments):
            kinds[lowered.arguments[int(parameter)].kind] += int(size)
        elif "preallocated-temp" in rest:
            heap += int(size)
    return heap, kinds


def largest_buffers(lowered: LoweredGraph, entry: Computation | None, buffers: str) -> tuple[Buffer, ...]:
    """The largest buffers in HBM at the peak; none without a module."""
    if entry is None:
        return ()
    made_by = {i.name: i for computation in entry.module.values() for i in computation.instructions}
    found = []
    for name, index, size in _ALIVE.findall(buffers):
        if name not in made_by:
            found.append(Buffer(int(size), "", name, name))
            continue
        parts, number = made_by[name].leaves, int(index.split(",")[0] or 0)
        leaf = parts[number] if number < len(parts) else None
        if leaf is None or leaf.space == HBM:
            owner = _owner(lowered, made_by[name]) or name
            found.append(Buffer(int(size), str(leaf or ""), owner, name))
    return tuple(sorted(found, key=lambda b: -b.bytes)[:LARGEST])


def _owner(lowered: LoweredGraph, instruction: Instruction) -> str:
    """The module in an instruction's metadata, or the argument that it is; else its first operand's."""
    for _ in range(_LOOK_BACK):
        if instruction.opcode == "parameter":
            number = int(instruction.arguments)
            return lowered.arguments[number].name if instruction.computation.entry else ""
        if (owner := module_of(instruction.op_name)) or not instruction.operands:
            return owner
        instruction = instruction.operands[0]
    return ""


def is_out_of_hbm(error: str) -> bool:
    """Did the step not fit, rather than fail? A kernel that asks for too much VMEM is RESOURCE_EXHAUSTED too."""
    return "RESOURCE_EXHAUSTED" in error and re.search(r"memory space hbm|space=hbm|on HBM,", error) is not None


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Reads libtpu's RESOURCE_EXHAUSTED: a table of allocations, with two decimals, or the one that failed.

    Newer ones (0.0.52) tell the sum alone, which they call that of the temporaries; the arguments are in it.
    """
    if total := re.search(r"total memory required for .*\((\S+)\) exceeds available HBM \((\S+)\)", message):
        return OutOfMemory(parse_size(total[1]), parse_size(total[2]))
    used, single = _find(r"Used (\S+) of \S+ hbm", message), _find(r"Allocation \(size=(\d+)\) would exceed", message)
    if single and not used:
        name = _find(r"tag = '(?:output of )?([^'@]*)", message)
        buffer = Buffer(int(single), _bare(_find(r"shape = '([^']*)'", message)), name, name)
        limit = int(_find(r"would exceed memory \(size=(\d+)\)", message))
        return OutOfMemory(buffer.bytes, limit, temp=buffer.bytes, buffers=(buffer,))
    return OutOfMemory(
        used=parse_size(used),
        limit=parse_size(_find(r"Used \S+ of (\S+) hbm", message)),
        temp=parse_size(_find(r"(?m)^\s+program\s+(\S+)\s*$", message)),
        argument=parse_size(_find(r"(?m)^\s+arguments\s+(\S+)\s*$", message)),
        output=parse_size(_find(r"Output size (\S+); shares \S+ with arguments", message)),
        alias=parse_size(_find(r"Output size \S+; shares (\S+?)\.* with arguments", message)),
        buffers=tuple(_buffer(paragraph) for paragraph in re.split(r"\n\s+\d+\. Size: ", message)[1:]),
    )


def _buffer(paragraph: str) -> Buffer:
    name = _find(r"XLA label: (.+?)(?: =|\n|$)", paragraph)
    module = module_of(_find(r'op_name="([^"]*)"', paragraph))
    return Buffer(parse_size(paragraph.split()[0]), _bare(_find(r"Shape: (\S+)", paragraph)), module or name, name)


def _find(pattern: str, text: str) -> str:
    """The pattern's first group, empty without a match."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def _bare(shape: str) -> str:
    """A shape's text without layouts."""
    return ", ".join(map(str, leaves(shape))) or shape
