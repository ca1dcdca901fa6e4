"""What the operands of a kernel's instructions mean: registers, variables, literals, addresses.

The base of the translator in ``translate.py``; everything here turns a piece of PTX into a C++
expression, or raises a ``PtxError``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .isa import WIDTH
from .parse import Entry, Instruction, Label, Module, PtxError, Variable

SPECIAL = {
    **{
        f"%{name}.{axis}": f"t->{name}[{index}]"
        for name in ("tid", "ntid", "ctaid", "nctaid")
        for index, axis in enumerate("xyz")
    },
    "%laneid": "t->lane",
    "%lanemask_eq": "(1u << t->lane)",
    "%lanemask_lt": "((1u << t->lane) - 1)",
    "%lanemask_le": "((2u << t->lane) - 1)",
    "%lanemask_gt": "(~((2u << t->lane) - 1))",
    "%lanemask_ge": "(~((1u << t->lane) - 1))",
    "%dynamic_smem_size": "t->dynamic_shared",
    "WARP_SZ": "32u",
}


@dataclass(frozen=True)
class Register:
    """A register's name in C++ and its width in bits, 1 for a predicate."""

    name: str
    width: int


def bits_type(width: int) -> str:
    """The register type of registers.h."""
    return "pred_t" if width == 1 else f"b{width}_t"


def type_tag(kind: str) -> str:
    """The type tag of semantics.h for a PTX type; untyped bits are unsigned."""
    return "op::" + (f"u{kind[1:]}" if re.fullmatch(r"b\d+", kind) else kind)


def align_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class Operands:
    """The names of one kernel and the instruction that is being translated."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self.entry = entry
        self.module = module
        self.variables: dict[str, Variable] = {}
        self.parameters = {parameter.name: parameter for parameter in entry.parameters}
        self.lay_out_variables()
        self.labels = {
            (statement.scope, statement.name)
            for statement in entry.body
            if isinstance(statement, Label)
        }
        self._current: Instruction | None = None

    @property
    def current(self) -> Instruction:
        assert self._current is not None
        return self._current

    # ---- declarations -------------------------------------------------------------------------

    def lay_out_variables(self) -> None:
        """Give shared variables their offsets; dynamic shared memory follows the static part."""
        self.shared: dict[str, int] = {}
        words = {
            word
            for statement in self.entry.body
            if isinstance(statement, Instruction)
            for operand in statement.operands
            for word in re.findall(r"[$\w]+", operand)
        }
        known = [*self.module.variables, *self.entry.variables]
        used = [variable for variable in known if variable.name in words]
        offset, dynamic = 0, []
        for variable in used:
            if variable.space != "shared":
                self.variables[variable.name] = variable
            elif variable.bytes == 0:
                dynamic.append(variable)
            else:
                offset = align_up(offset, variable.align)
                self.shared[variable.name] = offset
                offset += variable.bytes
        self.static_shared = offset
        self.dynamic_align = max([variable.align for variable in dynamic], default=1)
        # Every extern array starts at the same place, as in CUDA.
        for variable in dynamic:
            self.shared[variable.name] = align_up(offset, self.dynamic_align)

    def declarations(self) -> list[str]:
        lines = []
        for (scope, prefix), (kind, count) in self.entry.registers.items():
            if kind not in WIDTH:
                raise PtxError(self.entry.line, prefix, f"unknown register type .{kind}")
            names = [prefix] if count is None else [f"{prefix}{n}" for n in range(count)]
            for start in range(0, len(names), 12):
                text = ", ".join(
                    f"{self.cxx_name(scope, name)}{{}}" for name in names[start : start + 12]
                )
                lines.append(f"  {bits_type(WIDTH[kind])} {text};")
        return lines

    @staticmethod
    def cxx_name(scope: int, name: str) -> str:
        return f"s{scope}_{re.sub(r'[^$0-9A-Za-z_]', '_', name.lstrip('%'))}"

    # ---- operands -----------------------------------------------------------------------------

    def error(self, why: str) -> PtxError:
        return PtxError(self.current.line, self.current.text, why)

    @property
    def site(self) -> int:
        return self.current.line - self.entry.line + 1

    def find_register(self, name: str) -> Register | None:
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.current.scope):
            if found := self.entry.registers.get((scope, name)):
                return Register(self.cxx_name(scope, name), WIDTH[found[0]])
            found = self.entry.registers.get((scope, prefix))
            number = name[len(prefix) :]
            if found and found[1] is not None and number and int(number) < found[1]:
                return Register(self.cxx_name(scope, name), WIDTH[found[0]])
        return None

    def register(self, name: str) -> Register:
        found = self.find_register(name)
        if found is None:
            raise self.error(f"unknown register {name}")
        return found

    def immediate(self, text: str, width: int) -> str | None:
        """A literal as bits, or None if *text* is not one."""
        if match := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text):
            if width != (32 if match.group(1) in "fF" else 64):
                raise self.error(f"literal {text} does not have {width} bits")
            value = int(match.group(2), 16)
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            digits = text.rstrip("U")
            octal = re.fullmatch(r"-?0[0-7]+", digits)
            value = int(digits, 8) if octal else int(digits, 0)
        else:
            return None
        if width == 1:
            return f"pred_t({'true' if value else 'false'})"
        return f"{bits_type(width)}({value & (1 << width) - 1:#x}ull)"

    def operand(self, text: str, kind: str, *, widened: bool = False) -> str:
        """An expression for a source operand of the given type.

        *widened* allows a register wider than the type, of which the low bits are taken.
        """
        width = WIDTH[kind]
        if (literal := self.immediate(text, width)) is not None:
            return literal
        if text in SPECIAL:
            if width != 32:
                raise self.error(f"{text} read as {width} bits")
            return f"b32_t({SPECIAL[text]})"
        if text.startswith("!") and width == 1:
            return f"logic<op::Not<op::pred>>({self.register(text[1:]).name})"
        if text in self.shared:
            return f"{bits_type(width)}({self.shared[text]}ull)"
        if text in self.variables:
            if width != 64:
                raise self.error("an address has 64 bits")
            return f"b64_t(reinterpret_cast<uint64_t>({self.cxx_name(0, text)}))"
        register = self.register(text)
        if register.width == width:
            return register.name
        if widened and register.width > width > 1:
            return f"part<uint{width}_t, 0>({register.name})"
        raise self.error(f"{text} has {register.width} bits where {width} are needed")

    def assign(self, target: str, expression: str, kind: str, *, widened: bool = False) -> str:
        """Assign to a destination; *widened* extends a narrower result by its type."""
        if target == "_":
            return f"{expression};"
        register = self.register(target)
        width = WIDTH[kind]
        if register.width == width:
            return f"{register.name} = {expression};"
        if widened and register.width > width > 1:
            resize = f"op::Resize<{type_tag(kind)}, op::u{register.width}>"
            return f"{register.name} = moves<{resize}, 1>({expression});"
        raise self.error(f"{target} has {register.width} bits where {width} are needed")

    def address(self, text: str, *, shared: bool) -> tuple[str, str]:
        """Split ``[base+offset]`` into the expressions of base and offset.

        Only *shared* addresses may have 32 bits.
        """
        match = re.fullmatch(r"\[\s*([$%\w.]+)\s*(?:\+\s*(-?\w+)|(-\s*\d+))?\s*\]", text)
        if match is None:
            raise self.error(f"unknown address {text}")
        base, plus, minus = match.groups()
        offset = str(int((plus or minus or "0").replace(" ", ""), 0))
        if base in self.shared:
            return f"b64_t({self.shared[base]}ull)", offset
        if base in self.variables:
            return self.operand(base, "b64"), offset
        register = self.register(base)
        if register.width != 64 and not (shared and register.width == 32):
            raise self.error(f"{base} is no address of 64 bits")
        return register.name, offset
