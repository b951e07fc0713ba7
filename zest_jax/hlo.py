"""What devices exchange in a compiled program, read from its optimised HLO."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

_SIZES = {
    1: ("pred", "s4", "u4", "s8", "u8", "f8e4m3fn", "f8e5m2"),
    2: ("s16", "u16", "bf16", "f16"),
    4: ("s32", "u32", "f32"),
    8: ("s64", "u64", "f64"),
}
BYTES = {name: size for size, names in _SIZES.items() for name in names}
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z]+\d+(?:e\w+)?|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange of a compiled program.

    Attributes:
      operation: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, …
      shapes: what it gives to a device (what it takes, of a reduce-scatter), as "bf16[8,4]".
      bytes: of those.
      devices: that take part in it; 0 where the program does not tell.
      times: runs of it for one run of the loops whose length is not known.
      loops: how many such loops it is in.
      where: its place in the traced program (JAX's op_name).
    """

    operation: str
    shapes: tuple[str, ...]
    bytes: int
    devices: int
    times: int
    loops: int
    where: str

    @property
    def travels(self) -> float:
        """Bytes that one device sends in a run, by the usual ring algorithms."""
        share = (self.devices - 1) / self.devices if self.devices else 1.0
        return self.bytes * share * (2 if self.operation == "all-reduce" else 1)

    @property
    def shape(self) -> tuple[str, tuple[str, ...], int, int]:
        """What two programs are compared by."""
        return self.operation, self.shapes, self.times, self.loops


def collectives(text: str) -> list[Collective]:
    """All exchanges of an optimised HLO module, in the order of the text, each with how often it
    runs. Loops over a constant range are counted through; others (`while` whose end depends on
    data) are counted once and named in `loops`."""
    entry, computations = _computations(text)
    out = []
    for name, times, loops in _reached(entry, computations):
        for line in computations[name]:
            match = _OPERATION.search(line)
            if match is None:
                continue
            types, operation, start = match.groups()
            # A reduction of which every device keeps a part is a fusion around a whole reduction,
            # and named for it.
            if operation == "all-reduce" and name.startswith("all-reduce-scatter"):
                operation = "reduce-scatter"
            devices = _devices(line)
            shapes = _shapes(types)
            if start and operation in ("all-gather", "collective-permute"):
                shapes = [s for s in shapes if s[0] != "u32"]
                shapes = shapes[len(shapes) // 2 :]  # its operands stand before its results
            size = sum(BYTES[kind] * math.prod(dims) for kind, dims in shapes)
            if " reduce-scatter" in line:
                size *= devices or 1  # what it takes
            written = tuple(f"{kind}[{','.join(map(str, dims))}]" for kind, dims in shapes)
            where = re.search(r'op_name="([^"]*)"', line)
            out.append(
                Collective(
                    operation, written, size, devices, times, loops, where[1] if where else ""
                )
            )
    return out


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The entry's name, and the lines of every computation by name."""
    entry, current = "", None
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := _HEADER.match(line):
            current = found.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.rstrip() == "}":  # a constant of several lines may begin one with a brace
            current = None
        elif current is not None:
            current.append(line)
    return entry, found


def _reached(entry: str, computations: Mapping[str, list[str]]) -> Iterator[tuple[str, int, int]]:
    """Every computation, each time that it is called: name, runs, loops of unknown length."""
    todo = [(entry, 1, 0)]
    while todo:
        name, times, loops = todo.pop(0)
        if name not in computations:
            continue
        yield name, times, loops
        for line in computations[name]:
            if " while(" in line:
                body, condition = (
                    re.search(rf"{k}=%?([\w.\-]+)", line) for k in ("body", "condition")
                )
                assert body and condition
                count = _trips(line, condition[1], computations)
                inner = (times * (count or 1), loops + (count is None))
                todo += [(condition[1], *inner), (body[1], *inner)]
                continue
            called = _CALLED.findall(line)
            if match := re.search(r"branch_computations=\{([^}]*)\}", line):
                called += [part.strip().lstrip("%") for part in match[1].split(",")]
            todo += [(each, times, loops) for each in called]


def _trips(line: str, condition: str, computations: Mapping[str, list[str]]) -> int | None:
    """Turns of a loop: as the compiler notes, or by a condition "counter < constant"."""
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
        return int(match[1])
    lines = list(computations.get(condition, ()))
    for each in tuple(lines):
        lines += [x for name in _CALLED.findall(each) for x in computations.get(name, ())]
    compares = [x for x in lines if " compare(" in x]
    constants = [m[1] for x in lines if (m := re.search(r"= s32\[\]\S* constant\((\d+)\)", x))]
    if len(compares) != 1 or len(constants) != 1 or "direction=LT" not in compares[0]:
        return None
    return int(constants[0])


def _shapes(types: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n))
        for kind, dims in _SHAPE.findall(types)
        if kind in BYTES
    ]


def _devices(line: str) -> int:
    """Devices of a replica group; 0 where none are named."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = {k: int(n) for k, n in re.findall(r"'([^']+)'=(\d+)", match[1])}
        return math.prod(sizes.get(axis, 1) for axis in re.findall(r"'([^']+)'", match[2]))
    return 0


def summary(found: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, float]]:
    """(operation, part of the program) -> runs and bytes, for one turn of each unknown loop."""
    out: dict[tuple[str, str], tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for each in found:
        runs, size = out[each.operation, part(each)]
        out[each.operation, part(each)] = (runs + each.times, size + each.times * each.bytes)
    return dict(out)


PARTS = ("decode", "search", "extend")


def part(collective: Collective) -> str:
    """Where in a step an exchange stands: decode, search or extend of a rollout, "loop" in another
    loop of unknown length, "once" outside of all."""
    names = collective.where.split("/")
    for name in PARTS:
        if name in names:
            return name
    return "loop" if collective.loops else "once"
