"""Lattices on disk, in OpenFst's text form: one file for each utterance, and the words' numbers.

A line is "state state pdf+1 word graph-cost,acoustic-cost", the acoustic cost with its scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang.graphs import Graph
from ngsgd.config import DecodeConfig


def write_lattices(folder: Path, graph: Graph, utt_ids: Sequence[str], logliks: Sequence[npt.NDArray[np.float32]],
                   config: DecodeConfig, *, acoustic_scale: float) -> None:
    """`folder`/words.txt and one `folder`/UTTERANCE.lat.txt for each utterance; slashes in names become underscores."""
    folder.mkdir()
    files.write_text(folder / "words.txt", "".join(f"{word} {number}\n" for number, word in enumerate(("<eps>", *graph.words))))
    for utt_id, loglik_TP in zip(utt_ids, logliks, strict=True):
        lattice = decoding.lattice(graph, loglik_TP, acoustic_scale=acoustic_scale, beam=config.beam,
                                   lattice_beam=config.lattice_beam)
        files.write_text(folder / f"{utt_id.replace('/', '_')}.lat.txt", lattice.to_str(show_weight_one=True))
