"""Compile every kernel that dispatch can choose, for GPUs that need not be present, and list the resources it uses.

Each kernel is compiled for NVIDIA sm_80, sm_90 and sm_100 and AMD gfx942. The whole list goes to kernels/resources.csv,
a summary into kernels/README.md. Needs triton and no GPU; TRITON_INTERPRET must not be set. A row of the list names the
sources of its kernel, so only what changed since is compiled again. The list may be interrupted: what is done is kept.

    python scripts/bench/kernel_resources.py                     # what is missing; all of it: hours of two cores
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
    from titans_kernels import backward, decode, delta, forward, start

    modules = (forward, backward, delta, start, decode)
    return {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}


def used_by(shape, precision: str) -> list[tuple[str, dict]]:
    """The kernels that a memory of this shape launches, with their constants beyond the shape."""
    states = "linear_states_kernel" if shape.on_chip(precision) else "states_kernel"
    names, both = ("coefficients_kernel", states, "delta_states_kernel"), (False, True)
    found = [(name, dict(KEEP=keep)) for name in names for keep in both]
    others = ("outputs", "read_backward", "write_backward", "delta_write_backward", "gates_backward")
    found += [(f"{name}_kernel", {}) for name in others]
    found += [(name, dict(DELTA=delta)) for name in ("start_backward_kernel", "token_kernel") for delta in both]
    return [(name, dict(**more, TO_START=to_start)) for name, more in found for to_start in both]


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


def functions() -> dict[str, str]:
    """The code of every function of the kernels, by its name."""
    found = {}
    for name in ("tiles", "forward", "backward", "delta", "start", "decode"):
        source = (PACKAGE / f"{name}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                if node.name in found:
                    raise ValueError(f"two functions of the kernels are called {node.name}")
                found[node.name] = code_of(ast.get_source_segment(source, node))
    return found


def digests() -> dict[str, str]:
    """For every kernel a hash of its code and of all that it calls."""
    code, found = functions(), {}
    for kernel in (name for name in code if name.endswith("_kernel")):
        used, todo = set(), [kernel]
        while todo:
            name = todo.pop()
            if name not in used:
                used.add(name)
                todo += set(re.findall(r"\w+", code[name])) & code.keys()
        found[kernel] = hashlib.sha256("\n".join(code[name] for name in sorted(used)).encode()).hexdigest()[:8]
    return found


def triton_version() -> str:
    import triton

    return triton.__version__


SETTINGS = ["target", "kernel", "constants", "warps", "stages"]
COLUMNS = [*SETTINGS, *(field.name for field in fields(Resources)), "sources"]


def row_of(variant: Variant, found: Resources, sources: str) -> dict:
    constants = " ".join(f"{name}={value}" for name, value in variant.constants)
    chosen = dict(variant.options)
    settings = (chosen["num_warps"], chosen["num_stages"])
    values = (variant.target, variant.kernel, constants, *settings, *astuple(found), sources)
    return dict(zip(COLUMNS, map(str, values), strict=True))


def key_of(row: dict) -> tuple:
    return tuple(row[name] for name in SETTINGS)


def compile_all(todo: list[Variant], workers: int):
    """Yields the row of each variant."""
    sources = digests()
    with ProcessPoolExecutor(workers) as pool:
        found = tqdm(pool.map(compile_one, todo), total=len(todo), desc="compiling", smoothing=0)
        for variant, resources in zip(todo, found, strict=True):
            yield row_of(variant, resources, sources[variant.kernel])


def wanted() -> dict[tuple, Variant]:
    """Every variant by the key of its row."""
    nothing = Resources(0, 0, 0, 0)
    return {key_of(row_of(v, nothing, "")): v for v in variants(every_shape(), TARGETS)}


def up_to_date(rows: list[dict]) -> list[dict]:
    """The rows that these sources would give again, if the version of Triton is the same."""
    sources, known = digests(), wanted()
    return [row for row in rows if key_of(row) in known and row["sources"] == sources[row["kernel"]]]


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


def read_list() -> tuple[str, list[dict]]:
    """The Triton version of the list, and its rows."""
    with LIST.open(newline="") as file:
        _, _, version = file.readline().split()
        return version, list(csv.DictReader(file))


def write_list(rows: list[dict]) -> None:
    """Write the list, in the order of `wanted`, and the README's section."""
    order = {key: place for place, key in enumerate(wanted())}
    rows = sorted(rows, key=lambda row: order[key_of(row)])
    write_text(LIST, f"# triton {triton_version()}\n" + csv_text(rows, COLUMNS))
    README.write_text(readme_with(rows, triton_version()))


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
        "| target | variants | compiled | spilling | most registers | most shared memory | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    wanted_by = [target for target, *_ in wanted()]
    for target, (_, limit) in TARGETS.items():
        mine = [row for row in rows if row["target"] == target]
        spilling = sum(int(row["spilled"]) > 0 for row in mine)
        registers, shared = (max(int(row[name]) for row in mine) for name in ("registers", "shared"))
        counts = f"{wanted_by.count(target)} | {len(mine)} | {spilling}"
        lines.append(f"| {target} | {counts} | {registers} | {shared:,} B | {limit:,} B |")
    return "\n".join(lines)


def readme_with(rows: list[dict], version: str) -> str:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    section = f"""
Written by `python scripts/bench/kernel_resources.py` with triton {version}. `resources.csv` has every variant that was
compiled from the present sources:

{summary(rows)}

The kernels of the presets' memory, per target: registers of a thread (r; on AMD both register files), spilled bytes
(s), KiB of shared memory (K), warps (w):

{table(rows, default_shapes())}
"""
    return before + BEGIN + section + END + after


def differences(compiled: list[dict]) -> list[str]:
    """Where the project's list or README differs from what these sources give."""
    version, rows = read_list()
    found = problems(rows)
    current = {key_of(row) for row in up_to_date(rows)}
    if len(current) < len(rows):
        found.append(f"{LIST.name} was made from other sources: run this script without --check")
    presets = {key_of(row_of(v, Resources(0, 0, 0, 0), "")) for v in variants(default_shapes(), TARGETS)}
    found += [f"{LIST.name} lacks {missing}" for missing in sorted(presets - current)]
    if len(current) < len(wanted()):
        print(f"{LIST.name} has {len(current)} of {len(wanted())} variants", file=sys.stderr)
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
    if arguments.check:
        rows = list(compile_all(todo, arguments.workers))
        found = problems(rows) + differences(rows)
        for problem in found:
            print(problem, file=sys.stderr)
        sys.exit(bool(found))
    version, rows = read_list()
    rows = up_to_date(rows) if version == triton_version() else []
    done = {key_of(row) for row in rows}
    asked = set(todo)
    todo = [v for key, v in wanted().items() if v in asked and key not in done]
    try:
        for row in compile_all(todo, arguments.workers):
            rows.append(row)
    finally:
        write_list(rows)
    found = problems(rows)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(todo)} compiled, {len(found)} with problems; wrote {LIST.name} and {README.name}")
