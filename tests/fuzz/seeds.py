"""WHAT has been sent to open ports? The corpus: recorded probes, and how a fuzzer changes them.

A file in corpus/ is a seed of every test here; whatever once broke something goes there, under a name that says what.
"""

from pathlib import Path

from hypothesis import strategies as st

CORPUS = {path.stem: path.read_bytes() for path in sorted(Path(__file__).with_name("corpus").glob("*.bin"))}
PROBES = list(CORPUS.values())
EXTREME = [0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the seeds, cut, doubled, and with bytes and numbers in it replaced."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["flip", "cut", "insert", "number", "double", "replace"]))
        if what == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = draw(st.binary(max_size=20))
        elif what == "replace":
            new = draw(st.binary(max_size=20))
            data[at : at + len(new)] = new
        elif what == "number":
            size = draw(st.sampled_from([1, 2, 4, 8]))
            data[at : at + size] = (draw(st.sampled_from(EXTREME)) % 256**size).to_bytes(size, "little")
        else:
            data[at:at] = data[at : at + draw(st.integers(0, 64))]
    return bytes(data)


def anything(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    return changed(seeds) | st.binary(max_size=300)
