"""Compiles the Triton kernels for an H100 or H200 without one: `python -m tools.kernels`; what each takes of it.

A line per kernel and case: registers of a thread, bytes of its stack, where what fits into none goes, bytes of shared
memory of a program. Fails where one does not compile or takes more shared memory than a multiprocessor has.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etude.models.kernels.gpu import fused, paged_attention, vocabulary
from etude.models.kernels.pages import PAGE

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232_448
"""Shared memory that a program can have there."""
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MODELS = {
    "Qwen3-8B": (32, 8, 128, 128),
    "Qwen3-30B-A3B": (32, 4, 128, 128),
    "DeepSeek-V3": (128, 1, 576, 512),
    "GLM-4.5": (96, 8, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "Gemma-3-27B": (32, 16, 128, 128),
    "Gemma-3-1B": (4, 1, 256, 256),
}
"""Name → query heads, key heads, widths of a key and of a value."""
RULES = {"gpt-oss": (128, 1), "Gemma-3-27B": (1024, 0), "Gemma-3-1B": (512, 0)}
"""Name → window of the layers that have one, and 1 for sinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One compilation."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int]
    options: Mapping[str, int] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """Every kernel, in the shapes of known models."""
    for number, size in (("bf16", 2), ("fp32", 4)):
        ways = ("decode", "prompt", "tiles") if number == "bf16" else ("decode", "prompt")  # graphs are of bfloat16
        for model, heads in MODELS.items():
            for way in ways:
                yield _attention(f"attend {model} {number} {way}", heads, number, size, RULES.get(model, (0, 0)), way)
        some = {"x": number, "out": number, "cosines": "fp32", "sines": "fp32"}
        strides = ("token_stride", "head_stride", "stride", "table_stride", "heads")
        yield _case(f"rotate {number}", fused._rotate, some, strides, {"SIGN": 1, "HALF": 64, "X": 64}, num_warps=1)
        both = {"gate_up": number, "out": number}
        yield _case(f"gate {number}", fused._gate, both, ("token_stride", "half"), {"X": fused.BLOCK})
        back = both | {"gradient": number}
        yield _case(f"gate backward {number}", fused._gate_backward, back, ("token_stride", "half"), {"X": fused.BLOCK})
        sent = {"rows": number, "places": "i64", "gates": "fp32", "out": number}
        yield _case(f"combine {number}", fused._combine, sent, ("width",), {"K": 8, "X": fused.BLOCK})
        of = {name: kind for name, kind in sent.items() if name != "out"} | {
            "gradient": number,
            "of_rows": number,
            "of_gates": "fp32",
        }
        yield _case(f"combine backward {number}", fused._combine_backward, of, ("width",), {"K": 8, "X": fused.BLOCK})
        pages = {"k": number, "v": number, "keys": number, "values": number, "tables": "i32", "sequences": "i32",
                 "positions": "i64"}  # fmt: skip
        jumps = ("k_token", "k_head", "k_column", "v_token", "v_head", "v_column", "table_stride")
        room = {"K": 8, "D": 128, "W": 128, "S": PAGE, "X": 128}
        yield _case(f"write {number}", fused._write, pages, jumps, room, num_warps=1)
        joined = {"parts": "fp32", "masses": "fp32", "sinks": number, "out": number}
        counts = ("start", "count", "splits")
        yield _case(f"join {number}", paged_attention._join, joined, counts, {"Q": 32, "W": 128, "X": 16, "SINKS": 0})
        logits = {"logits": number, "ids": "i64", "temperatures": "fp32", "out": "fp32"}
        block = {"X": vocabulary.BLOCK}
        yield _case(f"read {number}", vocabulary._read, logits, ("rows", "vocabulary"), block, num_warps=8)
        numbers = ("entropies", "masses", "of_logprobs", "of_entropies")
        slope = logits | dict.fromkeys(numbers, "fp32") | {"out": number}
        yield _case(f"slope {number}", vocabulary._slope, slope, ("vocabulary",), block, num_warps=8)
        drawn = {"logits": number, "temperatures": "fp64", "uniforms": "fp64", "drawn": "i64"}
        draw = _case(f"draw {number}", vocabulary._draw, drawn, ("row_stride", "vocabulary"), block, num_warps=8)
        yield replace(draw, types={**draw.types, **dict.fromkeys(("unit", "fastest_fall", "nothing"), "fp32")})


def _attention(
    name: str, heads: tuple[int, int, int, int], number: str, size: int, rule: tuple[int, int], way: str
) -> Case:
    single = way == "decode"
    query_heads, key_heads, width, value_width = heads
    group = query_heads // key_heads
    cut = paged_attention.tuned(group, width + value_width, size, single=single)
    per_tile = 1 if single else max(1, cut.rows // group)
    low = paged_attention._power_below(width)
    pointers = {"q": number, "keys": number, "values": number, "tables": "i32", "sequences": "i32", "reach": "i64",
                "tiles": "i32", "sinks": number, "parts": "fp32", "masses": "fp32"}  # fmt: skip
    constants = {
        "Q": query_heads, "K": key_heads, "G": group, "PER_TILE": per_tile, "BLOCKS": -(-group * per_tile // cut.rows),
        "M": cut.rows, "D_LOW": low, "D_REST": width - low, "W": value_width, "S": PAGE, "PAGES": cut.pages, "SPLIT": 1,
        "WINDOW": rule[0], "SINKS": rule[1], "TILED": int(way == "tiles"),
    }  # fmt: skip
    sizes = ("table_stride", "token_stride", "head_stride", "start", "count", "span")
    case = _case(name, paged_attention._attend, pointers, sizes, constants, num_warps=cut.warps, num_stages=cut.stages)
    return replace(case, types={**case.types, "scale": "fp32"})


def _case(
    name: str, kernel: Any, pointers: Mapping[str, str], sizes: tuple[str, ...], constants: Mapping[str, int],
    **options: int,
) -> Case:  # fmt: skip
    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(sizes, "i32")
    return Case(name=name, kernel=kernel, types=types, constants=constants, options=options)


def compiled(case: Case) -> dict[str, int]:
    """Registers, bytes of the stack and shared bytes of a case, for Hopper."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=HOPPER, options=dict(case.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        dumped = subprocess.run([DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = dict(part.split(":", 1) for part in dumped.stdout.split() if part.count(":") == 1)
    return {"registers": int(used["REG"]), "stack_bytes": int(used["STACK"]), "shared_bytes": made.metadata.shared}


def main() -> int:
    """Compile all; 1 where one takes too much."""
    too_much = 0
    for case in cases():
        used = compiled(case)
        too_much += used["shared_bytes"] > SHARED_BYTES
        print(f"{case.name:34} {used['registers']:4} registers, {used['stack_bytes']:6} bytes of stack, "
              f"{used['shared_bytes']:7} shared", flush=True)  # fmt: skip
    return int(too_much > 0)


if __name__ == "__main__":
    sys.exit(main())
