"""Data steps beside the libraries that people use for the same; one JSON line for each measurement.

    pip install datasketch                               # for the case `minhash`
    python benchmarks/data_cpu.py                        # all cases
    python benchmarks/data_cpu.py minhash --documents 100000 --beside 10000

`minhash`: near duplicates among generated documents, a tenth of which are edited copies of others: 1 to 10 of 150 words
are changed, left out or added (`jaccard`: how similar such pairs are, mean and least), and the order is random. Ours
does all documents: what is dropped should be the later of each pair (recall, precision), `peak_mb` is the memory of all
its processes together. Then both do a smaller corpus, with the same shingles, permutations, bands and processes, from
JSONL to the list of what is dropped. Documents per second of processor time tell what an idle machine would do.

`tokenize`: the step, from JSONL on disk to the token store, beside `encode_batch` of `tokenizers` on the same texts in
memory, both in one process and on one thread, by turns; then the step with more workers. `share` is ours of theirs.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

SHARE, WORDS, EDITS, SHARDS = 0.1, 150, 10, 16
BANDS, ROWS, SHINGLE, SEED = 26, 11, 5, 42
Line = dict[str, Any]


# ---- minhash: the corpus


def write_corpus(folder: Path, count: int) -> tuple[set[str], list[float]]:
    """Write documents into shards; returns the ids that should be dropped, and how similar some pairs are."""
    rng = random.Random(SEED)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]
    vocabulary = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(30_000)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(vocabulary))))  # Zipf's law
    copies = round(SHARE * count)

    def draw(many: int) -> list[str]:
        return rng.choices(vocabulary, cum_weights=weights, k=many)

    def edited(text: str) -> str:
        words = text.split()
        for _ in range(rng.randint(1, EDITS)):
            place = rng.randrange(len(words))
            words[place : place + rng.randint(0, 1)] = draw(rng.randint(0, 1))
        return " ".join(words)

    documents = [(str(number), " ".join(draw(WORDS))) for number in range(count - copies)]
    documents += [(f"copy of {name}", edited(text)) for name, text in rng.sample(documents, copies)]
    texts = dict(documents)
    pairs = [(texts[name.removeprefix("copy of ")], text) for name, text in documents[-copies:][:1000]]
    rng.shuffle(documents)
    folder.mkdir()
    for shard in range(SHARDS):
        rows = documents[shard * count // SHARDS : (shard + 1) * count // SHARDS]
        lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows)
        (folder / f"docs-{shard:05}.jsonl").write_text(lines)
    seen: set[str] = set()
    later: set[str] = set()
    copied = {name.removeprefix("copy of ") for name, _ in documents if name.startswith("copy of ")}
    for name, _ in documents:
        original = name.removeprefix("copy of ")
        if original in seen:
            later.add(name)
        elif original in copied:
            seen.add(original)
    return later, [_jaccard(*pair) for pair in pairs]


def _jaccard(left: str, right: str) -> float:
    a, b = ({text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)} for text in (left, right))
    return len(a & b) / len(a | b)


# ---- minhash: who does it, each in a process of its own that prints what it drops


def palestra_minhash(source: Path, out: Path, workers: int) -> list[str]:
    from palestra.data.steps.dedup import dedup_fuzzy

    dedup_fuzzy(out, source=source, bands=BANDS, rows=ROWS, shingle=SHINGLE, seed=SEED, workers=workers)
    notes = (line for path in sorted((out / "notes").iterdir()) for line in path.read_text().splitlines())
    return [json.loads(line)["id"] for line in notes]


def datasketch_shard(path: Path) -> list[tuple[str, Any]]:
    from palestra.data.duplicates import normalized

    datasketch = importlib.import_module("datasketch")
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text = normalized(row["text"])
        minhash = datasketch.MinHash(num_perm=BANDS * ROWS, seed=SEED)
        minhash.update_batch([s.encode() for s in {text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)}])
        found.append((row["id"], minhash))
    return found


def datasketch_minhash(source: Path, out: Path, workers: int) -> list[str]:
    index = importlib.import_module("datasketch").MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    dropped = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for rows in pool.imap(datasketch_shard, sorted(source.iterdir())):
            for name, minhash in rows:
                if index.query(minhash):
                    dropped.append(name)
                index.insert(name, minhash)
    return dropped


SIDES = {"palestra": palestra_minhash, "datasketch": datasketch_minhash}


def minhash(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    wanted, similar = write_corpus(folder / "all", args.documents)
    line = _judged("palestra", folder / "all", args, args.documents, wanted)
    yield {**line, "jaccard": [round(sum(similar) / len(similar), 3), round(min(similar), 3)]}
    wanted, _ = write_corpus(folder / "beside", args.beside)
    lines = [_judged(who, folder / "beside", args, args.beside, wanted) for who in SIDES]
    yield from lines
    per = ("documents_per_s", "documents_per_cpu_s")
    yield {"case": "minhash", "times_faster": {key: round(lines[0][key] / lines[1][key], 2) for key in per}}


def _judged(who: str, source: Path, args: argparse.Namespace, count: int, wanted: set[str]) -> Line:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--side", who, str(source), f"{out}/out", str(args.workers)]
        printed, used = _measured(command)
    dropped = set(json.loads(printed))
    right = len(dropped & wanted)
    return {
        "case": "minhash",
        "who": who,
        "documents": count,
        "documents_per_s": round(count / used["seconds"], 1),
        "documents_per_cpu_s": round(count / used["cpu_s"], 1),
        "recall": round(right / len(wanted), 4),
        "precision": round(right / max(1, len(dropped)), 4),
        "workers": args.workers,
        **used,
    }


# ---- measuring


def _measured(command: list[str]) -> tuple[str, Line]:
    """What a command prints; its time, processor time and the most memory that it and its children had together."""
    before, began = _processor(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            peak[0] = max(peak[0], _memory(process.pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    printed, _ = process.communicate()
    seconds = time.perf_counter() - began
    stop.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    used = {"seconds": round(seconds, 2), "cpu_s": round(_processor() - before, 2), "peak_mb": peak[0] >> 20}
    return printed, used


def _memory(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [parent, *parent.children(recursive=True)])
    except psutil.NoSuchProcess:  # one ended between two lines
        return 0


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- tokenize


def tokenize(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """Tokens per second of the step and of the library."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: what is compared is the work, not the cores
    import tokenizers

    from palestra.data.readers import read_rows, shards
    from palestra.data.steps.tokenize import tokenize as step
    from palestra.data.steps.tokenize import train_tokenizer

    source, vocabulary = folder / "tokenize", folder / "vocabulary"
    write_corpus(source, args.beside)
    train_tokenizer(vocabulary, source=source, vocab_size=8192, max_documents=2000)
    library = tokenizers.Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    texts = [row["text"] for shard in shards(source) for row in read_rows(shard)]

    def theirs(round_: int) -> int:
        batches = (texts[at : at + 256] for at in range(0, len(texts), 256))
        return sum(len(found.ids) for batch in batches for found in library.encode_batch(batch))

    def ours(round_: int) -> int:
        step(folder / f"tokens{round_}", source=source, tokenizer=vocabulary, workers=1)
        return json.loads((folder / f"tokens{round_}/counts.json").read_text())["tokens"]

    rates: dict[str, list[float]] = {"tokenizers": [], "palestra": []}
    for round_ in range(args.rounds):
        for who, work in (("tokenizers", theirs), ("palestra", ours)):
            wall, processor = time.perf_counter(), time.process_time()
            tokens = work(round_)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            rates[who].append(tokens / processor)
            yield {
                "case": "tokenize",
                "who": who,
                "workers": 1,
                "tokens": tokens,
                "tokens_per_s": round(tokens / wall),
                "tokens_per_cpu_s": round(tokens / processor),
            }
    yield {"case": "tokenize", "share": round(max(rates["palestra"]) / max(rates["tokenizers"]), 3)}
    for workers in (1, args.workers):
        out = folder / f"with{workers}"
        wall = time.perf_counter()
        step(out, source=source, tokenizer=vocabulary, workers=workers)
        rate = round(json.loads((out / "counts.json").read_text())["tokens"] / (time.perf_counter() - wall))
        yield {"case": "tokenize", "who": "palestra", "workers": workers, "tokens_per_s": rate}


CASES: dict[str, Callable[[argparse.Namespace, Path], Iterator[Line]]] = {"minhash": minhash, "tokenize": tokenize}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=list(CASES), default=[], help="default: all")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--beside", type=int, default=10_000, help="documents that the other library does too")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of the case tokenize")
    args = parser.parse_args()
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            for line in CASES[name](args, Path(folder)):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        who, source, out, workers = sys.argv[2:]
        print(json.dumps(SIDES[who](Path(source), Path(out), int(workers))))
    else:
        main()
