"""Rows of files → prompts, end to end, against the tokenizer alone; and the memory that this takes as files grow.

    python -m hs_assets_tests.benchmarks.prompts --model SmolLM2-135M-Instruct chats.jsonl more.parquet
    python -m hs_assets_tests.benchmarks.prompts --model SmolLM2-135M-Instruct --memory 10000 100000

Speed: the index is made, then each partition is read, parsed, rendered, tokenised, masked and filtered; then the same
rendered texts go through `encode_batch` alone, in one call. Both are repeated in turn, and the best of each counts. Memory:
for each number of rows a process of its own makes all prompts of a file of so many, partition by partition; its largest
resident size is read from the kernel, and so is that of a process that only loads the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hs_assets.samples.conversations import Conversation, Text
from hs_assets.samples.filters import PromptLimits
from hs_assets.samples.formats import parse_row
from hs_assets.samples.masks import Rendered, render_conversation, render_text
from hs_assets.samples.prepare import make_partition
from hs_assets.samples.sources import Partitioning, Source, partition_keys, read_partition, refresh
from hs_assets.samples.tokenizer import ChatTokenizer, load_tokenizer

LIMITS = PromptLimits(max_tokens=1 << 20, vocab_size=1 << 20)
WORDS = ("the", "residual", "stream", "of", "a", "decoder", "layer", "is", "what", "all", "before", "it", "wrote", "into")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", required=True, type=Path, help="a folder with a tokenizer and a chat template")
    parser.add_argument("--partition-rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", nargs="+", type=int, default=[], metavar="ROWS")
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    partitioning = Partitioning(arguments.partition_rows, 10**9)
    if arguments.only is not None:
        tokenizer = load_tokenizer(arguments.model)
        sources = [Source("rows", arguments.only)] if arguments.only.name else []
        kept, rows, _ = make_all(sources, tokenizer, partitioning)
        print(json.dumps({"rows": rows, "kept": kept, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    print(f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}, {arguments.model}")
    if arguments.files:
        speed(arguments.files, arguments.model, partitioning, arguments.repeats)
    for count in arguments.memory and [0, *arguments.memory]:
        memory(count, arguments.model, arguments.partition_rows)


def make_all(sources: list[Source], tokenizer: ChatTokenizer, partitioning: Partitioning) -> tuple[int, int, int]:
    """All prompts of the sources, forgotten as soon as they are made: prompts, rows and tokens."""
    kept = rows = tokens = 0
    with tempfile.TemporaryDirectory() as folder:
        indexes = refresh(Path(folder), sources, partitioning)
        for key in partition_keys(indexes):
            source = next(source for source in sources if source.name == key.rpartition("-")[0])
            made = make_partition(key, source, read_partition(Path(folder), source, key), tokenizer, LIMITS)
            kept, rows = kept + len(made.prompts), rows + len(made.rows)
            tokens += sum(len(prompt.input_ids) for prompt in made.prompts)
    return kept, rows, tokens


def rendered_texts(sources: list[Source], tokenizer: ChatTokenizer, partitioning: Partitioning) -> list[str]:
    """The texts that the tokenizer gets."""
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for key in partition_keys(refresh(Path(folder), sources, partitioning)):
            source = next(source for source in sources if source.name == key.rpartition("-")[0])
            for row in read_partition(Path(folder), source, key):
                content = parse_row(row.raw).content
                if row.duplicate_of is None and isinstance(content, Conversation):
                    rendered = render_conversation(content, tokenizer)
                    texts += [one.text for one in rendered] if isinstance(rendered, tuple) else []
                elif row.duplicate_of is None and isinstance(content, Text):
                    text = render_text(content.text, tokenizer)
                    texts += [text.text] if isinstance(text, Rendered) else []
    return texts


def speed(files: list[Path], model: Path, partitioning: Partitioning, repeats: int) -> None:
    from transformers import AutoTokenizer

    tokenizer, bare = load_tokenizer(model), AutoTokenizer.from_pretrained(str(model)).backend_tokenizer
    sources = [Source(f"s{number}", path.absolute()) for number, path in enumerate(files)]
    texts = rendered_texts(sources, tokenizer, partitioning)
    ours, theirs = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        kept, rows, tokens = make_all(sources, tokenizer, partitioning)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        encoded = bare.encode_batch(texts, add_special_tokens=False)
        theirs.append(time.perf_counter() - began)
    bare_tokens = sum(len(one.ids) for one in encoded)
    mine, other = tokens / min(ours), bare_tokens / min(theirs)
    print(f"{', '.join(path.name for path in files)}: {rows:,} rows, {kept:,} prompts, {tokens:,} tokens")
    print(f"end to end           {min(ours):7.2f} s  {mine:12,.0f} tokens/s  (all: {', '.join(f'{s:.2f}' for s in ours)})")
    print(f"encode_batch alone   {min(theirs):7.2f} s  {other:12,.0f} tokens/s  (all: {', '.join(f'{s:.2f}' for s in theirs)})")
    print(f"ratio                {mine / other:7.2f}")


def memory(count: int, model: Path, partition_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for number in range(count):
                said = " ".join(WORDS[(number * 7 + n) % len(WORDS)] for n in range(20 + number % 40))
                turns = [{"role": "user", "content": f"{number}: {said}?"}, {"role": "assistant", "content": said}]
                file.write(json.dumps({"messages": turns}) + "\n")
        command = [sys.executable, "-m", "hs_assets_tests.benchmarks.prompts", "--model", model, "--only", path if count else ""]
        command += ["--partition-rows", str(partition_rows)]
        began = time.perf_counter()
        done = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        seconds = time.perf_counter() - began
    what = f"{done['rows']:>9,} rows" if count else "tokenizer alone"
    print(f"{what:<16}  largest resident size {done['bytes'] / 1e6:7.1f} MB  {done['kept']:,} prompts, {seconds:.0f} s")


if __name__ == "__main__":
    main()
