"""Sentence embeddings from a tuned artifact: a server's whole start-up, timed, and a check against eager PyTorch.

    python examples/embeddings.py minilm-l6.tuned --model ./all-MiniLM-L6-v2 [--check]

`--model` is the checkpoint's folder (safetensors and tokenizer.json). Serving needs torch, safetensors and tokenizers:
no transformers, no compiler, no Triton. `--check` imports transformers afterwards, embeds the same sentences with the
original model and exits with 1 unless every cosine is at least 0.9999.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Interest rates rose again this quarter.",
    "The central bank tightened monetary policy.",
    "How do I bake sourdough bread at home?",
]


def model_folder(text: str) -> Path:
    """Return a folder; `package:NAME/FOLDER` is one inside an installed Python package."""
    if not text.startswith("package:"):
        return Path(text)
    name, _, inner = text.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"error: no Python package {name!r} is installed")
    return Path(spec.submodule_search_locations[0]) / inner


def main() -> None:
    """Load, embed, print similarities; check if asked to."""
    parser = argparse.ArgumentParser(description="Embed sentences with a tuned artifact.")
    parser.add_argument("artifact")
    parser.add_argument("--model", required=True, help="the checkpoint's folder, or package:NAME/FOLDER")
    parser.add_argument("--check", action="store_true", help="compare with eager PyTorch")
    arguments = parser.parse_args()
    folder = model_folder(arguments.model)

    started = time.perf_counter()
    import torch
    from tokenizers import Tokenizer

    import tune_model

    imported = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tuned = tune_model.load(arguments.artifact, weights=folder)
    loaded = time.perf_counter()

    def embed(model) -> torch.Tensor:
        encoded = tokenizer.encode_batch(SENTENCES)
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        hidden = model(input_ids=ids, attention_mask=mask)["last_hidden_state"]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    vectors = embed(tuned)
    answered = time.perf_counter()
    compilers = [name for name in ("triton", "transformers", "torch._dynamo", "torch._inductor") if name in sys.modules]
    print(f"imports {imported - started:.2f} s, load {loaded - imported:.2f} s, first answer {answered - loaded:.3f} s")
    print(f"compilers and tracers imported: {', '.join(compilers) or 'none'}")
    print("cosine similarity of the sentences:")
    for sentence, row in zip(SENTENCES, vectors @ vectors.T, strict=True):
        print(f"  {'  '.join(f'{value:5.2f}' for value in row.tolist())}  {sentence}")

    if arguments.check:
        from transformers import AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        original = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        with torch.no_grad():
            cosine = (vectors * embed(original)).sum(-1)
        print(f"lowest cosine with eager PyTorch: {cosine.min().item():.7f}")
        if cosine.min().item() < 0.9999:
            sys.exit("error: the tuned model's embeddings differ from the original's")


if __name__ == "__main__":
    main()
