"""Sample text from an exported folder with Transformers alone: nothing of this package is imported.

For example `python launch/sample.py runs/quickstart/hf "def "`.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="the hf/ folder of a finished run, or any other with a causal model")
    parser.add_argument("prompt", nargs="?", default="def ", help='what the text begins with (default "def ")')
    parser.add_argument("--tokens", type=int, default=80, help="how many to add (default 80)")
    parser.add_argument("--temperature", type=float, default=0.7, help="smaller is safer (default 0.7)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives another text (default 0)")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        parser.error(f"{options.folder} has no config.json: give the hf/ folder of a finished run")
    return options


def main() -> None:
    options = parse_options()
    # Only now, so that a typo is told at once.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__} with {num_parameters / 1e6:.2f}M parameters; prompt {options.prompt!r}")
    torch.manual_seed(options.seed)
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(
        **inputs, max_new_tokens=options.tokens, do_sample=True, temperature=options.temperature, top_k=50
    )
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
