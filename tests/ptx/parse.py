"""Read PTX text into entries, instructions and variables. Knows the grammar, not the meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(ValueError):
    """The PTX text holds something the executor does not know; names the line."""

    def __init__(self, line: int, text: str, why: str) -> None:
        super().__init__(f"PTX line {line}: {why}: {text.strip()}")
        self.line = line


TYPE_BYTES = {kind + str(bits): bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter; ``count`` is 0 for a scalar, else the bytes of a struct."""

    name: str
    kind: str
    align: int
    count: int
    offset: int
    is_pointer: bool

    @property
    def bytes(self) -> int:
        return TYPE_BYTES[self.kind] * max(self.count, 1)


@dataclass(frozen=True)
class Variable:
    """A shared, constant or global variable; an ``extern`` one has no size of its own."""

    name: str
    space: str
    align: int
    bytes: int
    values: tuple[int, ...] | None
    line: int


@dataclass(frozen=True)
class Instruction:
    """``@guard opcode operands;`` as written; ``scope`` finds the registers of inline blocks."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    line: int
    scope: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Label:
    name: str
    line: int
    scope: tuple[int, ...]


@dataclass
class Entry:
    """A kernel: parameters, register declarations by scope, and its statements in order.

    *locations* maps a PTX line to (file, line), and to (file, line, caller's file, caller's line)
    in an inlined function.
    """

    name: str
    line: int
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    registers: dict[tuple[int, str], tuple[str, int | None]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)
    locations: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Module:
    """Everything of one PTX text."""

    text: str
    target: str
    entries: dict[str, Entry]
    variables: list[Variable]
    files: dict[int, str]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([$%\w]+):(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|loc|file|section)\b([^\n]*)")
_ENTRY = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)?\.entry\s+([$\w]+)\s*(?:\((.*?)\))?\s*([^{;]*)", re.DOTALL
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([$\w]+)\s*(?:\[(\d+)\])?$"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)?\.(shared|const|global)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([$\w]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_LOC = re.compile(r"\s*(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\s*(\d+)\s+"([^"]*)"')


def _blank_comments(text: str) -> str:
    """Replace comments by spaces so that positions and line numbers stay."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def split_operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail else parts


class _Reader:
    """Walks over the text once, statement by statement."""

    def __init__(self, text: str) -> None:
        self.text = _blank_comments(text)
        self.position = self.counted = 0
        self.lines = 1
        self.module = Module(text, "", {}, [], {})
        self.entry: Entry | None = None
        self.scope: tuple[int, ...] = ()
        self.scopes = 0
        self.location: tuple[int, ...] | None = None

    def line(self) -> int:
        self.lines += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.lines

    def error(self, why: str) -> PtxError:
        end = self.text.find("\n", self.position)
        return PtxError(self.line(), self.text[self.position : end], why)

    def skip_space(self) -> bool:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position < len(self.text)

    def read(self) -> Module:
        while self.skip_space():
            if match := _LINE_DIRECTIVE.match(self.text, self.position):
                self.line_directive(match)
            elif self.text[self.position] == "}":
                self.close_scope()
            elif self.text[self.position] == "{":
                self.open_scope()
            elif self.entry is None and (match := _ENTRY.match(self.text, self.position)):
                self.open_entry(match)
            elif self.entry is not None and (match := _LABEL.match(self.text, self.position)):
                self.entry.body.append(Label(match.group(1), self.line(), self.scope))
                self.position = match.end()
            else:
                self.statement()
        return self.module

    def line_directive(self, match: re.Match[str]) -> None:
        kind, rest = match.groups()
        if kind == "target":
            self.module.target = rest.split(",")[0].strip()
        elif kind == "address_size" and rest.strip() != "64":
            raise self.error("only 64-bit addresses are supported")
        elif kind == "file" and (parts := _FILE.match(rest)):
            self.module.files[int(parts.group(1))] = parts.group(2)
        elif kind == "loc" and (parts := _LOC.match(rest)):
            # Line 0 means code that belongs to no line: the last known one says more.
            numbers = tuple(int(number) for number in parts.groups() if number)
            if numbers[1]:
                self.location = numbers
        self.position = match.end()
        if kind == "section":  # debug strings: skip the block
            self.position = self.text.index("}", self.position) + 1

    def open_entry(self, match: re.Match[str]) -> None:
        name, parameters, directives = match.groups()
        self.entry = Entry(name, self.line(), self.parameters(parameters or ""))
        for directive in re.finditer(r"\.(\w+)\s*([\d,\s]*)", directives):
            numbers = tuple(int(n) for n in directive.group(2).replace(",", " ").split())
            self.entry.directives[directive.group(1)] = numbers
        unknown = self.entry.directives.keys() - {
            "maxntid",
            "minnctapersm",
            "maxnreg",
            "reqntid",
        }
        if unknown:
            raise self.error(f"unknown entry directive .{min(unknown)}")
        self.module.entries[name] = self.entry
        self.scopes = 0
        self.position = match.end()

    def parameters(self, text: str) -> list[Parameter]:
        found: list[Parameter] = []
        offset = 0
        for part in split_operands(text):
            match = _PARAMETER.match(part)
            if match is None or match.group(2) not in TYPE_BYTES:
                raise self.error(f"unknown parameter {part!r}")
            align, kind, pointer, name, count = match.groups()
            alignment = int(align or TYPE_BYTES[kind])
            offset = -(-offset // alignment) * alignment
            parameter = Parameter(
                name, kind, alignment, int(count or 0), offset, pointer is not None
            )
            offset += parameter.bytes
            found.append(parameter)
        return found

    def open_scope(self) -> None:
        if self.entry is None:
            raise self.error("a block outside an entry")
        self.scopes += 1
        self.scope = (*self.scope, self.scopes)
        self.position += 1

    def close_scope(self) -> None:
        if not self.scope:
            raise self.error("unbalanced brace")
        self.scope = self.scope[:-1]
        if not self.scope:
            self.entry = self.location = None
        self.position += 1

    def statement(self) -> None:
        end = self.text.find(";", self.position)
        if end < 0:
            raise self.error("a statement without its semicolon")
        text = " ".join(self.text[self.position : end].split())
        if text.startswith(".reg "):
            self.registers(text)
        elif text.startswith(".pragma"):
            pass
        elif text.startswith("."):
            self.variable(text)
        elif self.entry is not None and text:
            self.instruction(text)
        elif text:
            raise self.error("a statement outside an entry")
        self.position = end + 1

    def registers(self, text: str) -> None:
        match = _REGISTERS.match(text)
        if match is None or self.entry is None:
            raise self.error("unreadable register declaration")
        for name in split_operands(match.group(2)):
            prefix, _, count = name.partition("<")
            number = int(count.rstrip("> ")) if count else None
            self.entry.registers[self.scope[-1], prefix] = (match.group(1), number)

    def variable(self, text: str) -> None:
        match = _VARIABLE.match(text)
        if match is None or match.group(3) not in TYPE_BYTES:
            why = "unknown directive"
            if text.startswith(".local"):
                why = "local memory is refused"
            elif ".func " in text:
                why = "functions are refused: have them inlined"
            raise self.error(why)
        space, align, kind, name, shape, values = match.groups()
        size = TYPE_BYTES[kind]
        for extent in re.findall(r"\[(\d*)\]", shape):
            size *= int(extent or 0)
        where = self.entry.variables if self.entry is not None else self.module.variables
        initial = _initial_bytes(values, TYPE_BYTES[kind], self.error) if values else None
        where.append(
            Variable(name, space, int(align or TYPE_BYTES[kind]), size, initial, self.line())
        )

    def instruction(self, text: str) -> None:
        assert self.entry is not None
        guard = None
        if text.startswith("@"):
            guard, _, text = text[1:].partition(" ")
        opcode, _, rest = text.strip().partition(" ")
        line = self.line()
        if self.location is not None:
            self.entry.locations[line] = self.location
        operands = tuple(split_operands(rest))
        self.entry.body.append(Instruction(opcode, operands, guard, line, self.scope, text))


def _initial_bytes(text: str, width: int, error: object) -> tuple[int, ...]:
    """Bytes of an initialiser: numbers in braces, floats as ``0f``/``0d`` bit patterns."""
    found: list[int] = []
    for word in re.findall(r"[^{},\s]+", text):
        try:
            floating = word[:2].lower() in ("0f", "0d")
            value = int(f"0x{word[2:]}" if floating else word, 0)
        except ValueError:
            raise error(f"unsupported initialiser {word!r}") from None  # type: ignore[operator]
        found.extend((value & (1 << 8 * width) - 1).to_bytes(width, "little"))
    return tuple(found)


def parse(text: str) -> Module:
    """Parse PTX text; raises PtxError on anything outside the supported grammar."""
    return _Reader(text).read()


def instructions(entry: Entry) -> Iterator[Instruction]:
    """Yield the instructions of an entry, without its labels."""
    return (statement for statement in entry.body if isinstance(statement, Instruction))
