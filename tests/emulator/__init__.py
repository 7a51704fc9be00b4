"""CUDA kernels on the CPU: compiled to PTX by NVRTC, which needs no GPU, and interpreted by machine.cpp.

Accesses outside the given arrays or shared memory, misaligned ones, deadlocks, races of warps for words of shared memory
and registers touched while a wgmma is in flight are errors. Warps run in an order drawn from a seed, and cp.async and
wgmma complete early or late by the seed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from cupy_paged import jit

SPECIAL = ["tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z"]
SPECIAL += ["nctaid.x", "nctaid.y", "nctaid.z", "laneid", "cluster_ctarank", "cluster_nctarank"]
TYPES = [
    "pred",
    "b8",
    "u8",
    "s8",
    "b16",
    "u16",
    "s16",
    "b32",
    "u32",
    "s32",
    "b64",
    "u64",
    "s64",
    "f16",
    "bf16",
    "f32",
    "f64",
    "f16x2",
    "bf16x2",
    "u16x2",
    "e4m3x2",
]
BITS = {t: int(re.findall(r"\d+", t)[0]) for t in TYPES if t != "pred"} | {"f16x2": 32, "bf16x2": 32, "u16x2": 32}
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
SPACES = {"global": 0, "shared": 1, "param": 2, "local": 3}
ATOMS = ["add", "min", "max", "or", "and", "cas", "exch"]
FTZ, NAN, TRUNC = 1, 2, 8
SHARED_BASE = 1024
NOTHING = {"prefetch", "griddepcontrol", "fence", "setmaxnreg", "membar", "discard", "applypriority"}


class EmulationError(RuntimeError):
    """What a kernel did wrong."""


def available() -> bool:
    return shutil.which("g++") is not None


@functools.cache
def _machine():
    text = (Path(__file__).parent / "machine.cpp").read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cupy_paged_emulator"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            target = Path(scratch) / "machine.so"
            subprocess.run(
                ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-o", target, "-x", "c++", "-"],
                input=text,
                check=True,
            )
            target.replace(library)
    machine = ctypes.CDLL(str(library))
    machine.opcodes.restype = ctypes.c_char_p
    names = machine.opcodes().decode().split()
    return machine, {name.rstrip("_"): n for n, name in enumerate(names)}


@functools.cache
def ptx(file: str, constants: jit.Constants, arch: str) -> str:
    nvrtc = jit._nvrtc()
    flags = [*jit.options(constants), "-ftz=true", f"-arch=compute_{arch}", "-lineinfo", *jit._include_flags()]
    program = nvrtc.createProgram(jit.source(file), file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            raise jit.compile_error(file, arch, nvrtc.getProgramLog(program)) from error
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return text.decode() if isinstance(text, bytes) else text


def _number(text: str) -> int:
    if text.startswith(("0f", "0F", "0d", "0D")):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) & (1 << 64) - 1


class Program:
    """One kernel as the records that machine.cpp runs."""

    def __init__(self, text: str, entry: str) -> None:
        self.constants: list[int] = []
        self.rows: dict[object, int] = {f"%{name}": n for n, name in enumerate(SPECIAL)}
        self.symbols: dict[str, int] = {}
        self.cluster, self.local_bytes = 1, 0
        self.code: list[list[object]] = []
        self.arguments: list[object] = []  # registers by name, constants by number, until all are known
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = []
        self.static_bytes, self.dynamic = 0, []
        head, _, body = text.partition(f".entry {entry}(")
        if not body:
            raise ValueError(f"no kernel {entry}")
        for line in head.splitlines():
            self._variable(line.strip())
        parameters, _, body = body.partition(")")
        self.param_bytes = 0
        declared = r"\.param \.(?:align (\d+) \.)?(\w+) (\w+)(?:\[(\d+)\])?"
        for align, kind, name, count in re.findall(declared, parameters):
            size = BITS[kind] // 8
            align = int(align or size)
            self.symbols[name] = self.param_bytes = -(-self.param_bytes // align) * align
            self.param_bytes += size * int(count or 1)
        cluster = re.search(r"\.reqnctapercluster ([\d, ]+)", body)
        if cluster:
            self.cluster = int(np.prod([int(n) for n in cluster[1].split(",")]))
        self._statements(body)
        for name, align in self.dynamic:
            self.symbols[name] = SHARED_BASE + -(-self.static_bytes // align) * align
        self._link()

    def _variable(self, line: str) -> None:
        found = re.match(r"(\.extern )?\.(shared|local) \.align (\d+) \.(\w+)\s+([\w$]+)(?:\[(\d*)\])?;", line)
        if not found:
            return
        external, space, align, kind, name, count = found.groups()
        align, size = int(align), BITS[kind] // 8 * int(count or 1)
        if external:
            self.dynamic.append((name, align))
        elif space == "local":
            self.symbols[name] = self.local_bytes = -(-self.local_bytes // align) * align
            self.local_bytes += size
        else:
            begin = -(-self.static_bytes // align) * align
            self.symbols[name], self.static_bytes = SHARED_BASE + begin, begin + size

    def _statements(self, body: str) -> None:
        number, pending = 0, ""
        for line in body.splitlines():
            line = line.partition("//")[0].strip()
            if line.startswith((".loc\t", ".loc ")):
                number = int(line.split()[2])
                continue
            if not line or (line.startswith(".") and not line.startswith((".reg", ".local", ".shared"))):
                continue
            pending = f"{pending} {line}".strip()
            while pending:
                if pending[0] == "{":
                    self.scopes.append({})
                    pending = pending[1:].strip()
                elif pending[0] == "}":
                    self.scopes.pop()
                    if not self.scopes:
                        return
                    pending = pending[1:].strip()
                elif label := re.match(r"([\w$]+):(?!:)", pending):
                    self.labels[label[1]] = len(self.code)
                    pending = pending[label.end() :].strip()
                else:
                    statement, end, rest = pending.partition(";")
                    if not end:
                        break
                    pending = rest.strip()
                    if statement.startswith(".reg"):
                        for name in statement.split(None, 2)[2].split(","):
                            if "<" not in name:
                                self.scopes[-1][name.strip()] = f"{name.strip()}#{len(self.code)}"
                    elif statement.startswith("."):
                        self._variable(statement + ";")
                    elif statement.strip():
                        self._instruction(statement.strip(), number)

    def _name(self, name: str) -> object:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        if name == "_":
            return "%_"
        if name[0] == "%":
            return name
        if name in self.symbols or any(name == d for d, _ in self.dynamic):
            return ("symbol", name)
        return _number(name)

    def _instruction(self, text: str, line: int) -> None:
        predicate, negated = None, 0
        if text[0] == "@":
            guard, text = text[1:].split(None, 1)
            negated = int(guard[0] == "!")
            predicate = self._name(guard.lstrip("!"))
        opcode, _, rest = text.partition(" ") if " " in text else (text, "", "")
        opcode = opcode.split("\t")[0]
        rest = text[len(opcode) :].strip()
        parts = opcode.split(".")
        mods = parts[1:]
        types = [m for m in mods if m in TYPES]
        kind = types[-1] if types else "b32"
        pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        operands: list[object] = []
        grouped: list[int] = []  # how many registers stand in each piece
        offsets: list[int] = []
        negated_operand = 0
        if parts[0] == "bra":
            self.code.append(["bra", 0, 0, 0, predicate, negated, 0, len(self.arguments), 0, line, pieces[-1], 0])
            return
        for piece in pieces:
            if piece[0] == "[":
                base, sign, offset = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", piece).groups()
                operands.append(self._name(base))
                offsets.append((int(offset, 0) if offset else 0) * (-1 if sign == "-" else 1))
                grouped.append(1)
            else:
                names = [n.strip() for n in piece.strip("{}").split(",")]
                if "|" in piece:
                    names = piece.split("|")
                if names[0][0] == "!":
                    negated_operand, names = 1, [names[0][1:]]
                operands += [self._name(n) for n in names]
                grouped.append(len(names))
        op, mod, imm, target = parts[0], 0, offsets[0] if offsets else 0, 0
        results = grouped[0] if grouped else 0
        flags = (FTZ if "ftz" in mods else 0) | (NAN if "NaN" in mods else 0) | (TRUNC if "rz" in mods else 0)
        if op == "fence" and "proxy" in mods:
            op, operands = "proxy_fence", []
        elif op in NOTHING or op == "cvta":
            op = "mov" if op == "cvta" else "nop"
            operands = operands if op == "mov" else []
        elif op == "mov" and (grouped[0] > 1 or grouped[1] > 1):
            op, imm = ("pack", BITS[kind] // grouped[1]) if grouped[1] > 1 else ("unpack", BITS[kind] // grouped[0])
        elif op in ("mul", "mad") and "wide" in mods:
            op += "_wide"
        elif op == "mul" and "hi" in mods:
            op = "mul_hi"
        elif op == "cvt" and "sat" in mods and types == ["f32", "f32"]:
            op, mod = "fma", 1  # times 1, plus -0
            operands += [0x3F800000, 0x80000000]
        elif op == "cvt":
            kind, mod = types[0], TYPES.index(types[1])
            imm = next((n for n, r in enumerate(("n", "z", "m", "p")) if {"r" + r, f"r{r}i"} & set(mods)), 1)
        elif op == "setp":
            mod = COMPARE.index({"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(mods[0], mods[0]))
        elif op in ("ld", "st") and "async" not in mods:
            mod = SPACES[next(m for m in mods if m.partition("::")[0] in SPACES).partition("::")[0]]
            results = grouped[0] if op == "ld" else 0
        elif op == "st":
            op, results = "st_async", 0
        elif op in ("atom", "red"):
            if op == "red":
                operands.insert(0, "%_")
            space = next((SPACES[m.partition("::")[0]] for m in mods if m.partition("::")[0] in SPACES), 0)
            op, mod = "atom", space + 16 * ATOMS.index(next(m for m in mods if m in ATOMS))
        elif op == "shfl":
            mod = ["up", "down", "bfly", "idx"].index(mods[1])
            if grouped[0] == 1:
                operands.insert(1, "%_")
            results = 2
        elif op == "vote":
            mod, imm = ["all", "any", "ballot", "uni"].index(mods[1]), negated_operand
        elif op == "shf":
            mod = ("r" in mods) + 2 * ("clamp" in mods)
        elif op == "fma":
            mod = ("sat" in mods) + 2 * ("rm" in mods)
        elif op == "bfind":
            mod = int("shiftamt" in mods)
        elif op in ("bar", "barrier"):
            if "cluster" in mods:
                op = "barrier_cluster_" + ("arrive" if "arrive" in mods else "wait")
            elif mods[0] == "warp":
                op = "bar_warp"
            elif mods[0] == "red":
                op = "bar_red"
            else:
                op = "bar_arrive" if "arrive" in mods else "bar_sync"
            results = int(op == "bar_red")
        elif op == "cp":
            results = 0
            if "commit_group" in mods:
                op = "commit"
            elif "wait_group" in mods or "wait_all" in mods:
                op, mod = "copy_wait", int("wait_all" in mods)
            else:
                op, target = "copy", ("offset", offsets[1])
        elif op in ("ldmatrix", "stmatrix"):
            mod = int("trans" in mods)
            results = grouped[0] if op == "ldmatrix" else 0
        elif op == "mma":
            mod = int("bf16" in mods)
        elif op == "mbarrier":
            what = mods[0]
            op = {"init": "mb_init", "arrive": "mb_expect" if "expect_tx" in mods else "mb_arrive"}.get(what, "mb_wait")
            results = 0 if op == "mb_init" else 1
        elif op == "wgmma":
            if "mma_async" in mods:
                shape = next(m for m in mods if m.startswith("m64n"))
                imm, in_registers = int(shape[4:-3]), grouped[1] == 4
                trans = [int(n) for n in pieces[6:]]
                if not in_registers and trans[0]:
                    raise NotImplementedError("wgmma with transposed A")
                mod = ("bf16" in mods) + 2 * in_registers + 4 * trans[-1]
                if pieces[4:6] != ["1", "1"]:
                    raise NotImplementedError("wgmma with negated operands")
                operands = operands[: imm // 2 + (4 if in_registers else 1) + 2]
            else:
                op = {"fence": "nop", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}[mods[0]]
                results = 0
        self.code.append([op, TYPES.index(kind), mod, flags, predicate, negated, len(operands), len(self.arguments)])
        self.code[-1] += [results, line, target, imm]
        self.arguments += operands

    def _row(self, operand: object) -> object:
        """Number of a register's row; constants are numbered first, so registers come last."""
        if isinstance(operand, tuple):
            operand = self.symbols[operand[1]]
        if isinstance(operand, int):
            if ("constant", operand) not in self.rows:
                self.rows["constant", operand] = len(SPECIAL) + len(self.constants)
                self.constants.append(operand)
            return self.rows["constant", operand]
        return operand

    def _link(self) -> None:
        known = _machine()[1]
        unknown = sorted({str(c[0]) for c in self.code} - set(known))
        if unknown:
            raise NotImplementedError(f"opcodes not known to the machine: {', '.join(unknown)}")
        arguments = [self._row(a) for a in self.arguments]
        base = len(SPECIAL) + len(self.constants)
        names: dict[str, int] = {}

        def row(a: object) -> int:
            if isinstance(a, int):
                return a
            if a in self.rows:
                return self.rows[a]
            return names.setdefault(str(a), base + len(names))

        self.argument_rows = np.array([row(a) for a in arguments] or [0], np.int64)
        records = []
        for c in self.code:
            record = list(c)
            record[0] = known[str(c[0])]
            record[4] = -1 if c[4] is None else row(c[4])
            if isinstance(c[10], str):
                record[10] = self.labels[c[10]]
            elif isinstance(c[10], tuple):
                record[10] = c[10][1]
            records.append(record)
        self.records = np.array(records, np.int64)
        self.num_rows = base + len(names)
        self.constant_values = np.array(self.constants or [0], np.uint64)


@functools.cache
def program(file: str, entry: str, constants: jit.Constants, arch: str) -> Program:
    return Program(ptx(file, constants, arch), entry)


def run(file, entry, constants, arch, grid, threads, shared_bytes, params, arrays, seed=0, limit=2_000_000_000):
    """Run one kernel.

    Parameters
    ----------
    file, entry, constants, arch
        As for `cupy_paged.jit.load`.
    grid : tuple of int
    threads, shared_bytes : int
        Threads of a CTA (along x), and its dynamic shared memory.
    params : bytes
        The kernel's parameters.
    arrays : list of numpy.ndarray
        All global memory that the kernel may access; written only where ``flags.writeable``.
    seed : int
        Of the order in which warps run and of when asynchronous operations complete.

    Raises
    ------
    EmulationError
        An access out of bounds, a deadlock, ...; with the source line where it is known.
    """
    machine, _ = _machine()
    kernel = program(file, entry, tuple(constants), arch)
    dynamic_at = max((kernel.symbols[name] for name, _ in kernel.dynamic), default=SHARED_BASE + kernel.static_bytes)
    shared = dynamic_at - SHARED_BASE + shared_bytes
    spans = []
    for a in arrays:
        low, high = np.lib.array_utils.byte_bounds(a) if a.size else (0, 0)
        spans.append((low, high - low, int(a.flags.writeable)))
    spans = np.array(spans or [(0, 0, 0)], np.uint64)
    geometry = np.array([*(*grid, 1, 1)[:3], threads, kernel.cluster, shared, kernel.local_bytes], np.uint32)
    error = ctypes.create_string_buffer(1 << 16)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    number = ctypes.c_uint64
    status = machine.run(
        pointer(kernel.records), number(len(kernel.records)), pointer(kernel.argument_rows),
        pointer(kernel.constant_values), number(len(kernel.constants)), number(kernel.num_rows), pointer(geometry),
        ctypes.c_char_p(params), number(len(params)), pointer(spans), number(len(spans)), number(seed), number(limit),
        error, number(len(error)),
    )  # fmt: skip
    if status:
        raise EmulationError(f"{entry}: {_with_source(error.value.decode(), file)}")


def _with_source(text: str, file: str) -> str:
    lines = jit.source(file).splitlines()

    def show(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"line {number} `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else found[0]

    return re.sub(r"line (\d+)", show, text)
