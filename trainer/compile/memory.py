"""HBM of a compiled step, from the compiler's statistics, its buffer assignment, or its out-of-memory error."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trainer.compile.hlo.collectives import module_of
from trainer.compile.hlo.text import Computation, Instruction, Module, leaves
from trainer.compile.lowering import Lowered

LARGEST = 20
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_ALIVE = re.compile(r"^ +(\S+?)\{([\d,]*)\}: (\d+) bytes", re.MULTILINE)


@dataclass(frozen=True)
class Buffer:
    """One of the largest: its bytes, shape and the module (or argument) that it belongs to."""

    bytes: int
    shape: str
    module: str
    name: str


@dataclass(frozen=True)
class Sizes:
    """Bytes a chip.

    Args:
        peak_bytes: the most that is alive at once, by the compiler; where it does not fit, what it would have to hold.
        required_bytes: what must be free to load and run it: arguments, outputs that replace none, the heap of
            temporaries with its gaps. The compiler refuses a step by this number.
        argument_bytes: weights_bytes + optimizer_bytes + batch_bytes + other_bytes.
        alias_bytes: of outputs that take the place of arguments.
        temp_bytes: the heap of temporaries.
        compiler_temp_bytes: `temp` as the compiler's statistics give it, which can exceed the heap.
        host_temp_bytes: offloaded.
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
class Memory(Sizes):
    """Sizes, and what an error told.

    Args:
        limit: what the compiler said a chip has for a program, 0 if it did not say.
        refused: the largest buffers of a step that does not fit.
    """

    limit: int
    refused: tuple[Buffer, ...]


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's refusal, in bytes; what it did not say is 0."""

    used: int
    limit: int
    program: int
    arguments: int
    outputs: int
    shared: int
    buffers: tuple[Buffer, ...]


def memory_of(result: dict, buffers: str, lowered: Lowered) -> Memory:
    """Sizes of a step that fits or, from the error, of one that does not.

    Args:
        result: of the compiling process: its statistics, or ``error``.
        buffers: its allocations.
    """
    heap, kinds = _assigned(buffers, lowered)
    arguments = sum(kinds.values())
    if "error" in result:
        refusal = parse_out_of_memory(result["error"])
        arguments = max(arguments, refusal.arguments)
        temp = max(heap, refusal.program)
        kept = refusal.outputs - refusal.shared
        required = max(temp + arguments + kept, refusal.used)
        peak, compiler_temp, code, host_temp, host_arguments = required, refusal.program, 0, 0, 0
        outputs, alias, limit, refused = refusal.outputs, refusal.shared, refusal.limit, refusal.buffers
    else:
        arguments = result["argument"]
        outputs, alias = result["output"], result["alias"]
        compiler_temp = result["temp"]
        temp = heap or compiler_temp
        required = arguments + temp + max(outputs - alias, 0)
        peak, code = result["peak"], result["generated_code"]
        if result["host_temp"]:  # the statistic counts what is on the host too
            peak = required
        required = max(peak, required)
        host_temp, host_arguments = result["host_temp"], result["host_argument"]
        limit, refused = 0, ()
    return Memory(
        peak_bytes=peak,
        required_bytes=required,
        argument_bytes=arguments,
        weights_bytes=kinds["weights"],
        optimizer_bytes=kinds["optimizer"],
        batch_bytes=kinds["batch"],
        other_bytes=arguments - kinds["weights"] - kinds["optimizer"] - kinds["batch"],
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=temp,
        compiler_temp_bytes=compiler_temp,
        code_bytes=code,
        host_temp_bytes=host_temp,
        host_argument_bytes=host_arguments,
        limit=limit,
        refused=refused,
    )


def _assigned(buffers: str, lowered: Lowered) -> tuple[int, dict[str, int]]:
    """(bytes of the temporaries' heap in HBM, bytes of arguments by kind); only HBM, which has no color."""
    kinds = {"weights": 0, "optimizer": 0, "batch": 0, "other": 0}
    heap = 0
    for size, rest in _ALLOCATION.findall(buffers):
        if "color " in rest:
            continue
        parameter = re.search(r"parameter (\d+)", rest)
        if parameter and int(parameter[1]) < len(lowered.arguments):
            kinds[lowered.arguments[int(parameter[1])].kind] += int(size)
        elif "preallocated-temp" in rest:
            heap += int(size)
    return heap, kinds


def largest_buffers(lowered: Lowered, module: Module | None, buffers: str) -> tuple[Buffer, ...]:
    """The largest in HBM of those alive at the peak."""
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


def _owner(lowered: Lowered, module: Module, home: Computation, instruction: Instruction | None) -> str:
    """The module of an instruction's metadata, or the argument that it is; without, what it was made from."""
    for _ in range(8):
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
    """Read libtpu's RESOURCE_EXHAUSTED, in either form: a table of allocations, or the one allocation that failed.

    Sizes have two decimals, so they are good to a hundredth of their unit.
    """
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
        used=_bytes(used[1]) if used else 0,
        limit=_bytes(used[2]) if used else 0,
        program=_line(message, "program"),
        arguments=_line(message, "arguments"),
        outputs=_bytes(outputs[1]) if outputs else 0,
        shared=_bytes(outputs[2].rstrip(".")) if outputs else 0,
        buffers=tuple(_refused(block) for block in re.split(r"\n\s+\d+\. Size: ", message)[1:]),
    )


def _refused(block: str) -> Buffer:
    def field(pattern: str) -> str:
        match = re.search(pattern, block)
        return match[1] if match else ""

    name = field(r"XLA label: (.+?)(?: =|\n|$)")
    module = module_of(field(r'op_name="([^"]*)"'))
    return Buffer(_bytes(block.split()[0]), _bare(field(r"Shape: (\S+)")), module or name, name)


def _line(message: str, what: str) -> int:
    match = re.search(rf"^\s+{what}\s+(\S+)\s*$", message, re.MULTILINE)
    return _bytes(match[1]) if match else 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)([BKMGT]?)", text)
    return math.ceil(float(match[1]) * _UNITS[match[2]]) if match else 0


def _bare(shape: str) -> str:
    """Without layouts."""
    return ", ".join(map(str, leaves(shape))) or shape
