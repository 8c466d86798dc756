"""Compile every kernel that dispatch can choose, for GPUs that need not be present, and list the resources it uses.

Each kernel is compiled for NVIDIA sm_80, sm_90 and sm_100 and AMD gfx942. The whole list goes to kernels/resources.csv,
a summary into kernels/README.md. Needs triton and no GPU; TRITON_INTERPRET must not be set.

    python scripts/bench/kernel_resources.py                     # all of it: about an hour of two cores
    python scripts/bench/kernel_resources.py --defaults --check  # the presets' memory: compile, compare with the list
"""

import argparse
import ast
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tqdm import tqdm

from titans_kernels.served import Shape, every_shape, options

from ..configuration_titans import PRESETS, TitansConfig
from ..records.files import csv_text, write_text

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of triton 3.9, not of 3.10

ROOT = Path(__file__).parents[2]
PACKAGE, LIST, README = (ROOT / "kernels" / name for name in ("titans_kernels", "resources.csv", "README.md"))
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"

# Shared memory that one program may use, in bytes.
TARGETS = {
    "sm_80": (("cuda", 80, 32), 166_912),
    "sm_90": (("cuda", 90, 32), 232_448),
    "sm_100": (("cuda", 100, 32), 232_448),
    "gfx942": (("hip", "gfx942", 64), 65_536),
}
PRECISIONS = ("tf32", "ieee")
INTEGERS, FLOATS = ("first", "N", "P", "H", "GROUP", "normalised"), ("max_surprise", "hidden_step")
POINTERS = {"chunks": "*i32", "counts": "*i64", "length": "*i64", "next_length": "*i64"}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: its compile-time arguments, and the compiler's options."""

    target: str
    kernel: str
    constants: tuple[tuple[str, int | str | bool], ...]
    options: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel uses per thread; agpr is AMD's second register file, spilled is in bytes."""

    registers: int
    agpr: int
    spilled: int
    shared: int


def kernels() -> dict:
    """Every kernel by its name."""
    from titans_kernels import backward, decode, delta, forward

    modules = (forward, backward, delta, decode)
    return {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}


def used_by(shape, precision: str) -> list[tuple[str, dict]]:
    """The kernels that a memory of this shape launches, with their constants beyond the shape."""
    states = "linear_states_kernel" if shape.on_chip(precision) else "states_kernel"
    names = ("coefficients_kernel", states, "delta_states_kernel")
    found = [(name, dict(KEEP=keep)) for name in names for keep in (False, True)]
    others = ("outputs", "read_backward", "write_backward", "delta_write_backward", "gates_backward")
    found += [(f"{name}_kernel", {}) for name in others]
    return found + [("token_kernel", dict(DELTA=delta)) for delta in (False, True)]


def variants(shapes, targets) -> list[Variant]:
    found = {}
    for target in targets:
        for shape in shapes:
            for precision in PRECISIONS:
                for name, more in used_by(shape, precision):
                    known = dict(**shape.constants(name), PRECISION=precision, **more)
                    constants = tuple((p.name, known[p.name]) for p in kernels()[name].params if p.is_constexpr)
                    chosen = options(name, amd=TARGETS[target][0][0] == "hip")
                    found[Variant(target, name, constants, tuple(chosen.items()))] = None
    return list(found)


def compile_one(variant: Variant) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, constants = kernels()[variant.kernel], dict(variant.constants)
    signature, aligned = {}, {}
    for place, parameter in enumerate(fn.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif name in INTEGERS or name in FLOATS:
            signature[name] = "i32" if name in INTEGERS else "fp32"
        else:
            signature[name] = POINTERS.get(name, "*fp32")
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[variant.target][0]), options=dict(variant.options))
    read = _read_amd if "amdgcn" in compiled.asm else _read_nvidia
    return read(compiled.asm, compiled.metadata.shared)


def _read_nvidia(asm: dict, shared: int) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", printed).groups())
    return Resources(registers, 0, stack, shared)


def _read_amd(asm: dict, shared: int) -> Resources:
    def note(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])[1])

    return Resources(note("vgpr_count"), note("agpr_count"), note("private_segment_fixed_size"), shared)


def code_of(source: str) -> str:
    """The source without docstrings, comments and blank lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = [""] * (last - first)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest() -> str:
    """A hash of what decides the resources: the code of the kernels and the launch sizes."""
    files = [PACKAGE / f"{name}.py" for name in ("tiles", "forward", "backward", "delta", "decode", "served")]
    return hashlib.sha256("\n".join(code_of(file.read_text()) for file in files).encode()).hexdigest()[:16]


def triton_version() -> str:
    import triton

    return triton.__version__


COLUMNS = ["target", "kernel", "constants", "warps", "stages", *(field.name for field in fields(Resources))]


def row_of(variant: Variant, found: Resources) -> dict:
    constants = " ".join(f"{name}={value}" for name, value in variant.constants)
    chosen = dict(variant.options)
    settings = (chosen["num_warps"], chosen["num_stages"])
    values = (variant.target, variant.kernel, constants, *settings, *astuple(found))
    return dict(zip(COLUMNS, map(str, values), strict=True))


def compile_all(todo: list[Variant], workers: int) -> list[dict]:
    with ProcessPoolExecutor(workers) as pool:
        found = list(tqdm(pool.map(compile_one, todo, chunksize=4), total=len(todo), desc="compiling", smoothing=0))
    return [row_of(*pair) for pair in zip(todo, found, strict=True)]


def problems(rows: list[dict]) -> list[str]:
    """The kernels that spill or exceed the shared memory."""
    found = []
    for row in rows:
        limit = TARGETS[row["target"]][1]
        if int(row["spilled"]) or int(row["shared"]) > limit:
            found.append(
                f"{row['kernel']} ({row['constants']}) on {row['target']}: {row['spilled']} bytes spilled, "
                f"{row['shared']} of {limit} bytes of shared memory"
            )
    return found


def read_list() -> tuple[str, str, list[dict]]:
    """The digest and the Triton version of the list, and its rows."""
    with LIST.open(newline="") as file:
        _, _, made_from, _, version = file.readline().split()
        return made_from, version, list(csv.DictReader(file))


def write_list(rows: list[dict]) -> None:
    write_text(LIST, f"# sources {digest()} triton {triton_version()}\n" + csv_text(rows, COLUMNS))


def default_shapes() -> list:
    """The memories of the presets."""
    found = {}
    for name in PRESETS:
        config = TitansConfig.preset(name)
        width, depth = config.head_dim, config.memory_depth
        found[Shape(depth, config.memory_chunk_size, width, width * (config.memory_expansion if depth > 1 else 1))] = (
            None
        )
    return list(found)


def table(rows: list[dict], shapes) -> str:
    """Markdown: the given shapes, target beside target."""
    wanted = {(v.kernel, " ".join(f"{n}={x}" for n, x in v.constants)) for v in variants(shapes, TARGETS)}
    cells = {(row["kernel"], row["constants"], row["target"]): row for row in rows}
    lines = [
        "| kernel | constants | stages | " + " | ".join(TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    for name, constants in sorted(wanted):
        line = [cells[name, constants, target] for target in TARGETS]
        shown = [f"{x['registers']} r, {x['spilled']} s, {int(x['shared']) / 1024:.0f} K, {x['warps']} w" for x in line]
        lines.append(f"| `{name}` | {constants} | {line[0]['stages']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def summary(rows: list[dict]) -> str:
    """Markdown: over all variants, target by target."""
    lines = [
        "| target | variants | spilling | most registers | most shared memory | limit |",
        "|---|---|---|---|---|---|",
    ]
    for target, (_, limit) in TARGETS.items():
        mine = [row for row in rows if row["target"] == target]
        spilling = sum(int(row["spilled"]) > 0 for row in mine)
        registers, shared = (max(int(row[name]) for row in mine) for name in ("registers", "shared"))
        lines.append(f"| {target} | {len(mine)} | {spilling} | {registers} | {shared:,} B | {limit:,} B |")
    return "\n".join(lines)


def readme_with(rows: list[dict], version: str) -> str:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    section = f"""
Written by `python scripts/bench/kernel_resources.py` with triton {version}. All variants are in `resources.csv`:

{summary(rows)}

The kernels of the presets' memory, per target: registers of a thread (r; on AMD both register files), spilled bytes
(s), KiB of shared memory (K), warps (w):

{table(rows, default_shapes())}
"""
    return before + BEGIN + section + END + after


def differences(compiled: list[dict]) -> list[str]:
    """Where the project's list or README differs from what these sources give."""
    made_from, version, rows = read_list()
    found = problems(rows)
    if made_from != digest():
        found.append(f"{LIST.name} was made from other sources: run this script without --check")
    names = ("target", "kernel", "constants")
    listed = {tuple(row[name] for name in names) for row in rows}
    wanted = {tuple(row_of(v, Resources(0, 0, 0, 0))[name] for name in names) for v in variants(every_shape(), TARGETS)}
    found += [f"{LIST.name} lacks {missing}" for missing in sorted(wanted - listed)]
    found += [f"{LIST.name} has {more}, which nothing launches" for more in sorted(listed - wanted)]
    if version != triton_version():
        print(f"the list is of triton {version}, this is {triton_version()}: numbers are not compared", file=sys.stderr)
    else:
        found += [f"not as in {LIST.name}: {row}" for row in compiled if row not in rows]
    if readme_with(rows, version) != README.read_text():
        found.append(f"{README.name} does not show what {LIST.name} says")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--defaults", action="store_true", help="only the presets' memory shapes")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed list differs")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: kernels cannot be compiled in this process")
    todo = variants(default_shapes() if arguments.defaults else every_shape(), arguments.targets)
    rows = compile_all(todo, arguments.workers)
    found = problems(rows) + (differences(rows) if arguments.check else [])
    for problem in found:
        print(problem, file=sys.stderr)
    if arguments.check:
        sys.exit(bool(found))
    if arguments.defaults or set(arguments.targets) != set(TARGETS):
        print(f"{len(rows)} compiled; the list is only written for all shapes and targets")
        return
    write_list(rows)
    README.write_text(readme_with(rows, triton_version()))
    print(f"{len(rows)} compiled, {len(found)} with problems; wrote {LIST.name} and {README.name}")
