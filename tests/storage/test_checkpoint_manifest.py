"""A checkpoint's list of files finds what was cut short, damaged or lost."""

from pathlib import Path

import pytest

from hybrid3d.storage import manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.distcp").write_bytes(bytes(range(100)))
    (tmp_path / "deep" / "b").write_bytes(b"hello")
    assert manifest.list_files(tmp_path) == ["a.distcp", "deep/b"]
    manifest.write(tmp_path, {name: manifest.fsync_and_crc(tmp_path / name) for name in manifest.list_files(tmp_path)})
    return tmp_path


def test_check_value_of_crc_32(tmp_path: Path) -> None:
    """0xCBF43926 is that of "123456789" in every catalogue of CRCs."""
    (tmp_path / "x").write_bytes(b"123456789")
    assert manifest.fsync_and_crc(tmp_path / "x") == 0xCBF43926


def test_whole_checkpoint_passes(saved: Path) -> None:
    manifest.check(saved)


def test_flipped_bit(saved: Path) -> None:
    (saved / "deep/b").write_bytes(b"hellp")
    with pytest.raises(manifest.BrokenCheckpoint, match=r"deep/b has CRC-32 [0-9a-f]{8}, written was 3610a686"):
        manifest.check(saved)
    manifest.check(saved, 0, 2)  # the other rank's share: the larger file


def test_files_are_each_in_one_share_of_alike_bytes() -> None:
    sizes = {f"{number}": size for number, size in enumerate([900, 500, 400, 30, 20, 10, 0])}
    shares = manifest._shares(sizes, 2)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert [sum(sizes[name] for name in share) for share in shares] == [930, 930]


def test_file_cut_short_is_found(saved: Path) -> None:
    (saved / "a.distcp").write_bytes(bytes(range(50)))
    with pytest.raises(manifest.BrokenCheckpoint, match=r"a\.distcp has 50 bytes, 100 were written"):
        manifest.check(saved)


def test_lost_file_is_found(saved: Path) -> None:
    (saved / "a.distcp").unlink()
    with pytest.raises(manifest.BrokenCheckpoint, match=r"a\.distcp is missing"):
        manifest.check(saved)


@pytest.mark.parametrize(
    "content",
    [None, "{", "{}", "[]", '{"files": []}', '{"files": {"deep/b": 5}}', '{"files": {"deep/b": {"bytes": 5}}}'],
)
def test_manifest_itself_is_checked(saved: Path, content: str | None) -> None:
    if content is None:
        (saved / manifest.MANIFEST).unlink()
    else:
        (saved / manifest.MANIFEST).write_text(content)
    with pytest.raises(manifest.BrokenCheckpoint, match="no list of its files"):
        manifest.check(saved)
