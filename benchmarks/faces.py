"""Time of opening a gallery of 100,000 synthetic people, and of searching, enrolling and removing.

    .venv/bin/python benchmarks/faces.py                    (about a minute; 1 GB of memory and of disk)

Embeddings are random unit vectors of 512 numbers. The time of the model is not included. Times are medians; the
search is exact.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from vitrail.faces.gallery import Gallery


def random_embeddings(count, width, seed):
    """Return random unit vectors (count, width)."""
    vectors = np.random.default_rng(seed).standard_normal((count, width), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def timed(run):
    """Return the result of a function and its seconds."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--probes", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "people.gallery"
        vectors = random_embeddings(options.people, options.width, 0)
        with Gallery.open(path, model="synthetic", width=options.width) as gallery:
            # One transaction for all people: `enroll` would flush the disk for each person.
            with gallery._writing():
                for number in range(options.people):
                    gallery._insert_images(f"Person {number}", {f"{number:064x}": vectors[number]})
            gallery._empty_journal()
            index, seconds = timed(gallery.index)
            print(f"file {path.stat().st_size / 1e6:,.0f} MB; read into memory in {seconds:.2f} s")
            hits, times, cpu_start = [], [], time.process_time()
            for number in range(options.probes):
                matches, seconds = timed(lambda number=number: index.search(vectors[number * 7], 5))
                times.append(seconds)
                hits.append(matches[0].name == f"Person {number * 7}")
            cpu = 1e3 * (time.process_time() - cpu_start) / options.probes
            median, slowest = 1e3 * statistics.median(times), 1e3 * max(times)
            print(f"search {median:.1f} ms per image, slowest {slowest:.1f} ms, CPU {cpu:.1f} ms;", end=" ")
            print(f"{sum(hits)} of {len(hits)} people identified")
            added = random_embeddings(10, options.width, 1)
            times = [
                timed(lambda i=i: gallery.enroll(f"New {i}", added[i : i + 1], [f"new {i}"]))[1] for i in range(10)
            ]
            print(f"enroll {1e3 * statistics.median(times):.1f} ms per person")
            _, seconds = timed(lambda: gallery.remove("New 3"))
            print(f"remove {seconds:.2f} s per person (the file is rewritten)")


if __name__ == "__main__":
    main()
