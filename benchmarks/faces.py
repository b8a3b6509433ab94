"""A gallery of 100,000 made-up people: how long are opening, searching, enrolling and removing?

    .venv/bin/python benchmarks/faces.py                    (about a minute; 1 GB of memory and of disk)

Embeddings are random unit vectors of 512 numbers; the time of the model is not in it. Medians; the search is exact.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from vitrail.faces.gallery import Gallery


def unit(count, width, seed):
    found = np.random.default_rng(seed).standard_normal((count, width), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def timed(run):
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--people", type=int, default=100_000)
    words.add_argument("--width", type=int, default=512)
    words.add_argument("--probes", type=int, default=50)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "people.gallery"
        vectors = unit(asked.people, asked.width, 0)
        with Gallery.open(path, model="made-up", width=asked.width) as gallery:
            # One transaction: a person each, as `enroll` writes them, takes a flush of the disk each.
            with gallery._writing():
                for number in range(asked.people):
                    gallery._insert_images(f"Person {number}", {f"{number:064x}": vectors[number]})
            gallery._empty_journal()
            index, seconds = timed(gallery.index)
            print(f"file {path.stat().st_size / 1e6:,.0f} MB; read into memory in {seconds:.2f} s")
            found, times, busy = [], [], time.process_time()
            for number in range(asked.probes):
                best, seconds = timed(lambda number=number: index.search(vectors[number * 7], 5))
                times.append(seconds)
                found.append(best[0].name == f"Person {number * 7}")
            busy = 1e3 * (time.process_time() - busy) / asked.probes
            middle, slowest = 1e3 * statistics.median(times), 1e3 * max(times)
            print(f"search {middle:.1f} ms an image, slowest {slowest:.1f} ms, CPU {busy:.1f} ms;", end=" ")
            print(f"{sum(found)} of {len(found)} found")
            new = unit(10, asked.width, 1)
            times = [
                timed(lambda at=at: gallery.enroll(f"New {at}", new[at : at + 1], [f"new {at}"]))[1] for at in range(10)
            ]
            print(f"enroll {1e3 * statistics.median(times):.1f} ms a person")
            _, seconds = timed(lambda: gallery.remove("New 3"))
            print(f"remove {seconds:.2f} s a person: the file is written anew")


if __name__ == "__main__":
    main()
