"""Translate one PTX kernel into C++ that compiles against ``runtime/registers.h``.

Each PTX instruction becomes one C++ statement. Regular instructions come from the table in
``isa.py``; the irregular ones (moves, memory, control flow, warp operations) are here. Whatever is
in neither is a ``PtxError`` that names the PTX line.

Sites in the generated text count from the kernel's first line, so that the compiled kernel can be
reused when another kernel of the same module changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import isa
from .isa import WIDTH
from .operands import Operands, bits_type, type_tag
from .parse import Entry, Instruction, Label, Module, PtxError, Variable, split_operands

REFUSED = {
    "atom": "atomics are refused: their order, and so the bits, would not be fixed",
    "red": "atomics are refused: their order, and so the bits, would not be fixed",
    "call": "calls are refused: inline the function",
    "tex": "textures are refused",
    "tld4": "textures are refused",
    "suld": "surfaces are refused",
    "sust": "surfaces are refused",
    "activemask": "its result is not defined by the program",
    "ex2": "approximate: its bits are a property of the hardware",
    "lg2": "approximate: its bits are a property of the hardware",
    "sin": "approximate: its bits are a property of the hardware",
    "cos": "approximate: its bits are a property of the hardware",
    "tanh": "approximate: its bits are a property of the hardware",
    "rsqrt": "approximate: its bits are a property of the hardware",
}
UNROUNDED = re.compile(r"(add|sub|mul|mad)(\.ftz|\.sat)*\.f(32|64)$")

LOAD_MODIFIERS = {
    "nc", "ca", "cg", "cs", "lu", "cv", "volatile", "weak",
    "L1::no_allocate", "L1::evict_normal", "L1::evict_first", "L1::evict_last",
    "L1::evict_unchanged", "L2::64B", "L2::128B", "L2::256B",
}  # fmt: skip
STORE_MODIFIERS = {
    "wb", "cg", "cs", "wt", "volatile", "weak",
    "L1::no_allocate", "L1::evict_normal", "L1::evict_first", "L1::evict_last",
    "L1::evict_unchanged",
}  # fmt: skip
SPACES = {"global": "GLOBAL", "shared": "SHARED", "const": "CONSTANT", "": "GENERIC"}
VECTORS = {"v2": 2, "v4": 4}
MEMORY_TYPES = WIDTH.keys() - {"pred", "f16", "bf16"}

SHUFFLES = {
    "up": "SHUFFLE_UP",
    "down": "SHUFFLE_DOWN",
    "bfly": "SHUFFLE_BFLY",
    "idx": "SHUFFLE_IDX",
}
VOTES = {"ballot.b32", "all.pred", "any.pred", "uni.pred"}
BARRIERS = {"bar.sync", "barrier.sync", "barrier.sync.aligned", "bar.cta.sync"}
FENCES = {"membar.cta", "membar.gl", "membar.sys"}  # one thread runs at a time: nothing to do


@dataclass(frozen=True)
class Translation:
    """The C++ text of a kernel and what a launch must know of it."""

    source: str
    synchronises: bool
    static_shared: int
    dynamic_shared_align: int
    variables: dict[str, Variable]


class _Translator(Operands):
    synchronises = False

    def regular(self, form: isa.Form) -> str:
        target, *sources = self.current.operands
        if len(sources) != len(form.operands):
            raise self.error(f"{len(form.operands)} source operands expected")
        widened = self.current.opcode.startswith("cvt")
        values = [
            self.operand(text, kind, widened=widened)
            for text, kind in zip(sources, form.operands, strict=True)
        ]
        call = f"{form.call}({', '.join(values)})"
        return self.assign(target, call, form.result, widened=widened)

    def lop3(self) -> str:
        target, a, b, c, table = self.current.operands
        values = ", ".join(self.operand(text, "b32") for text in (a, b, c))
        return self.assign(target, f"logic<op::Lop3<{int(table, 0)}u>>({values})", "b32")

    def setp(self, form: isa.Form) -> str:
        """``setp p|q, a, b, c``: p = test with c, q = not test with c."""
        targets = self.current.operands[0].split("|")
        values = [
            self.operand(text, kind)
            for text, kind in zip(self.current.operands[1:], form.operands, strict=True)
        ]
        combine = form.rule.partition("|")[2]
        lines = [f"const pred_t test = any<op::{form.operation}>({values[0]}, {values[1]});"]
        for index, target in enumerate(targets):
            value = "test" if index == 0 else "logic<op::Not<op::pred>>(test)"
            if combine:
                value = f"logic<op::{combine}<op::pred>>({value}, third)"
            lines.append(self.assign(target.strip(), value, "pred"))
        if combine:
            lines.insert(0, f"const pred_t third = {values[2]};")
        return f"{{ {' '.join(lines)} }}"

    def mov(self, kind: str) -> str:
        if kind not in WIDTH or kind in ("f16", "bf16", "b8", "u8", "s8"):
            raise self.error(f"unknown type .{kind}")
        target, source = self.current.operands
        if target.startswith("{"):
            return self.unpack(split_operands(target[1:-1]), source, kind)
        if source.startswith("{"):
            return self.assign(target, self.packed(split_operands(source[1:-1]), kind), kind)
        return self.assign(target, self.operand(source, kind), kind)

    def unpack(self, targets: list[str], source: str, kind: str) -> str:
        narrow = WIDTH[kind] // len(targets)
        if len(targets) not in (2, 4) or narrow < 16:
            raise self.error("unsupported vector move")
        lines = [f"const {bits_type(WIDTH[kind])} whole = {self.operand(source, kind)};"]
        for index, target in enumerate(targets):
            if target != "_":
                value = f"part<uint{narrow}_t, {index}>(whole)"
                lines.append(self.assign(target, value, f"b{narrow}"))
        return f"{{ {' '.join(lines)} }}"

    def packed(self, sources: list[str], kind: str) -> str:
        narrow = WIDTH[kind] // len(sources)
        if len(sources) not in (2, 4) or narrow < 16:
            raise self.error("unsupported vector move")
        values = [self.operand(text, f"b{narrow}") for text in sources]
        while len(values) > 1:
            narrow *= 2
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [f"pack<uint{narrow}_t>({low}, {high})" for low, high in pairs]
        return values[0]

    def access(self, words: list[str], allowed: set[str]) -> tuple[str, int, str]:
        """Read space, vector length and type from the modifiers of ld or st."""
        *modifiers, kind = words
        space, count = "", 1
        for word in modifiers:
            if word in ("global", "shared", "const", "param") and not space:
                space = word
            elif word == "shared::cta" and not space:
                space = "shared"
            elif word in VECTORS and count == 1:
                count = VECTORS[word]
            elif word not in allowed:
                raise self.error(f"unknown modifier .{word}")
        if kind not in MEMORY_TYPES:
            raise self.error(f"unknown type .{kind}")
        if count * WIDTH[kind] > 128:
            raise self.error("an access has at most 16 bytes")
        return space, count, kind

    def load(self, words: list[str]) -> str:
        target, source = self.current.operands
        space, count, kind = self.access(words, LOAD_MODIFIERS)
        if space == "param":
            return self.load_parameter(target, source, kind, count)
        base, offset = self.address(source, shared=space == "shared")
        call = f"load<{type_tag(kind)}, {count}>(t, {SPACES[space]}, {base}, {offset}, {self.site})"
        targets = split_operands(target[1:-1]) if count > 1 else [target]
        if len(targets) != count:
            raise self.error(f"{count} registers expected")
        parts = [
            self.assign(name, f"q.e[{index}]", kind, widened=True)
            for index, name in enumerate(targets)
            if name != "_"
        ]
        return f"{{ const auto q = {call}; {' '.join(parts)} }}"

    def load_parameter(self, target: str, source: str, kind: str, count: int) -> str:
        match = re.fullmatch(r"\[\s*([$\w]+)\s*(?:\+\s*(\d+))?\s*\]", source)
        if match is None or match.group(1) not in self.parameters:
            raise self.error("a parameter at a fixed offset expected")
        parameter = self.parameters[match.group(1)]
        start, width = int(match.group(2) or 0), WIDTH[kind] // 8
        if start + count * width > parameter.bytes:
            raise self.error("reads past the end of the parameter")
        targets = split_operands(target[1:-1]) if count > 1 else [target]
        return " ".join(
            self.assign(
                name,
                f"parameter<{type_tag(kind)}>(t, {parameter.offset + start + index * width})",
                kind,
                widened=True,
            )
            for index, name in enumerate(targets)
        )

    def store(self, words: list[str]) -> str:
        target, source = self.current.operands
        space, count, kind = self.access(words, STORE_MODIFIERS)
        if space in ("param", "const"):
            raise self.error(f"a store to .{space}")
        base, offset = self.address(target, shared=space == "shared")
        sources = split_operands(source[1:-1]) if count > 1 else [source]
        if len(sources) != count:
            raise self.error(f"{count} registers expected")
        values = ", ".join(self.operand(text, kind, widened=True) for text in sources)
        where = f"{SPACES[space]}, {base}, {offset}, {self.site}"
        return f"store<{type_tag(kind)}>(t, {where}, {values});"

    def cvta(self, words: list[str]) -> str:
        target, source = self.current.operands
        to = words[0] == "to"
        space, kind = words[-2:]
        if kind != "u64" or space not in ("global", "shared", "const") or len(words) != 2 + to:
            raise self.error("unknown address conversion")
        value = self.operand(source, "u64")
        if space == "shared":
            operation = "Sub" if to else "Add"
            value = f"any<op::{operation}<op::u64>>({value}, b64_t(SHARED_WINDOW))"
        return self.assign(target, value, "u64")

    def branch(self, words: list[str]) -> str:
        if words not in ([], ["uni"]):
            raise self.error("unknown branch")
        return f"goto {self.label(self.current.operands[0])};"

    def label(self, name: str) -> str:
        for depth in range(len(self.current.scope), 0, -1):
            if (self.current.scope[:depth], name) in self.labels:
                return self.cxx_label(self.current.scope[:depth], name)
        raise self.error(f"unknown label {name}")

    def cxx_label(self, scope: tuple[int, ...], name: str) -> str:
        return f"L{self.cxx_name(scope[-1], name)}"

    def barrier(self) -> str:
        if self.current.operands != ("0",):
            raise self.error("only barrier 0 of the whole block is supported")
        self.synchronises = True
        return f"t->services->barrier(t, {self.site});"

    def warp(self, operation: str, a: str, b: str, c: str, mask: str) -> str:
        self.synchronises = True
        return f"warp(t, {operation}, {a}, {b}, {c}, {self.operand(mask, 'b32')}, {self.site})"

    def shuffle(self, mode: str) -> str:
        target, a, b, c, mask = self.current.operands
        values = [self.operand(text, "b32") for text in (a, b, c)]
        call = self.warp(SHUFFLES[mode], values[0], values[1], values[2], mask)
        value, _, predicate = target.partition("|")
        lines = [self.assign(value.strip(), "w.value", "b32")]
        if predicate.strip() not in ("", "_"):
            lines.append(self.assign(predicate.strip(), "w.predicate", "pred"))
        return f"{{ const WarpResult w = {call}; {' '.join(lines)} }}"

    def vote(self, mode: str) -> str:
        target, source, mask = self.current.operands
        operation = f"VOTE_{mode.partition('.')[0].upper()}"
        zero = "b32_t(0)"
        call = self.warp(operation, f"widened({self.operand(source, 'pred')})", zero, zero, mask)
        if mode == "ballot.b32":
            return self.assign(target, f"{call}.value", "b32")
        return self.assign(target, f"{call}.predicate", "pred")

    def irregular(self, opcode: str) -> str:
        """Instructions whose operands are not simply results and sources."""
        name, *words = opcode.split(".")
        handlers: dict[str, Callable[[list[str]], str]] = {
            "ld": self.load,
            "st": self.store,
            "cvta": self.cvta,
            "bra": self.branch,
        }
        if name in handlers:
            return handlers[name](words)
        if name == "mov" and len(words) == 1:
            return self.mov(words[0])
        if opcode == "lop3.b32":
            return self.lop3()
        if opcode in ("ret", "exit"):
            return "return;"
        if opcode == "trap":
            return f"t->services->trap(t, {self.site});"
        if opcode in BARRIERS:
            return self.barrier()
        if opcode in FENCES:
            return ";"
        if opcode == "bar.warp.sync":
            zero = "b32_t(0)"
            return self.warp("WARP_SYNC", zero, zero, zero, self.current.operands[0]) + ";"
        if name == "shfl" and words[::2] == ["sync", "b32"] and words[1] in SHUFFLES:
            return self.shuffle(words[1])
        if name == "vote" and words[:1] == ["sync"] and ".".join(words[1:]) in VOTES:
            return self.vote(".".join(words[1:]))
        raise self.error(self.why_unknown(opcode))

    @staticmethod
    def why_unknown(opcode: str) -> str:
        name = opcode.partition(".")[0]
        if UNROUNDED.match(opcode):
            return "no rounding modifier, so ptxas may fuse it and its bits are open; use .rn"
        if ".approx" in opcode or ".full" in opcode:
            return "approximate: its bits are a property of the hardware"
        return REFUSED.get(name, f"unknown instruction {opcode}")

    def statement(self, instruction: Instruction) -> str:
        self._current = instruction
        opcode = instruction.opcode
        try:
            if form := isa.INSTRUCTIONS.get(opcode):
                body = self.regular(form)
            elif form := isa.SETP.get(opcode):
                body = self.setp(form)
            else:
                body = self.irregular(opcode)
        except (ValueError, IndexError) as error:
            if isinstance(error, PtxError):
                raise
            raise self.error("wrong operands") from error
        if instruction.guard is None:
            return body
        negated = instruction.guard.startswith("!")
        register = self.register(instruction.guard.lstrip("!"))
        test = f"taken(t, {register.name}, {self.site})"
        return f"if ({'!' if negated else ''}{test}) {{ {body} }}"

    # ---- the whole kernel ---------------------------------------------------------------------

    def body(self) -> Iterable[str]:
        for position, statement in enumerate(self.entry.body):
            if isinstance(statement, Label):
                yield f"{self.cxx_label(statement.scope, statement.name)}:;"
                yield from self.count(position + 1)
            else:
                if position == 0:
                    yield from self.count(position)
                yield f"  {self.statement(statement)}  // {statement.text}"
                if statement.opcode.startswith("bra") and statement.guard:
                    yield from self.count(position + 1)

    def count(self, start: int) -> Iterable[str]:
        """Count the instructions of a straight run where it begins."""
        length = 0
        for statement in self.entry.body[start:]:
            if isinstance(statement, Label):
                break
            length += 1
            if statement.opcode.startswith("bra") or statement.opcode in ("ret", "exit"):
                break
        if length:
            yield f"  COUNT({length});"

    def tables(self) -> Iterable[str]:
        """Module-scope variables; checked launches register them as read-only."""
        for name, variable in self.variables.items():
            values = variable.values or ()
            data = ", ".join(map(str, values)) or "0"
            yield f"alignas({max(variable.align, 16)}) static unsigned char "
            yield f"    {self.cxx_name(0, name)}[{max(variable.bytes, 1)}] = {{{data}}};"
        yield "static const Variable variables[] = {"
        for name, variable in self.variables.items():
            yield f'  {{"{name}", {self.cxx_name(0, name)}, {variable.bytes}}},'
        yield '  {"", nullptr, 0}};'

    def translate(self) -> Translation:
        body = list(self.body())
        count = len(self.variables)
        lines = [
            '#include "registers.h"',
            *self.tables(),
            "static void kernel(Thread* t) {",
            *self.declarations(),
            *body,
            "}",
            'extern "C" __attribute__((visibility("default"))) const KernelImage ptx_image = {',
            f"    kernel, {int(self.synchronises)}, {count}, variables}};",
        ]
        return Translation(
            "\n".join(lines) + "\n",
            self.synchronises,
            self.static_shared,
            self.dynamic_align,
            self.variables,
        )


def translate(module: Module, entry: Entry) -> Translation:
    """Translate one kernel of a parsed module."""
    return _Translator(module, entry).translate()
