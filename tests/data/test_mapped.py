from pathlib import Path

import numpy as np
import pytest

from ngsgd.data import mapped

ROWS_TD = np.random.default_rng(0).standard_normal((1000, 7)).astype(np.float32)


def test_pieces_are_written_as_numpy_writes_the_whole(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", ROWS_TD)
    found = mapped.write_rows(tmp_path / "pieces.npy", ROWS_TD.shape, iter(np.split(ROWS_TD, [1, 400])))
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert isinstance(found, np.memmap)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_concatenated_rows_of_a_map_are_in_an_unnamed_file(tmp_path: Path, is_mapped: bool) -> None:
    source = mapped.write_rows(tmp_path / "rows.npy", ROWS_TD.shape, [ROWS_TD]) if is_mapped else ROWS_TD
    found = mapped.concatenated(iter([source[2:5], source[7:9]]), (5, 7), source)
    assert np.array_equal(found, ROWS_TD[[2, 3, 4, 7, 8]])
    assert isinstance(found, np.memmap) == is_mapped
    assert len(list(tmp_path.iterdir())) == is_mapped


def test_blocks_are_all_rows_and_a_map_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "BLOCK_ROWS", 64)
    source = mapped.write_rows(tmp_path / "rows.npy", ROWS_TD.shape, [ROWS_TD])
    assert np.array_equal(np.concatenate([np.array(block) for block in mapped.blocks(source)]), ROWS_TD)
    assert np.array_equal(source, ROWS_TD)


def test_private_changes_of_a_map_are_kept(tmp_path: Path) -> None:
    mapped.write_rows(tmp_path / "rows.npy", ROWS_TD.shape, [ROWS_TD])
    private = np.load(tmp_path / "rows.npy", mmap_mode="c")
    private[3] = 1.0
    mapped.release(private)
    assert (private[3] == 1.0).all()
