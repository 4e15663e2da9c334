"""An upload is read once, deleted, and never anything but an upload."""

import io
from pathlib import Path

import pytest
from conftest import SMALL, make_jpeg
from PIL import Image

from geoguessr_rl import photo_drop
from geoguessr_rl.images import BadImageError, open_upright
from geoguessr_rl.photo_drop import take


def sent(folder: Path, content: bytes) -> str:
    path = folder / "a" / "photo.jpg"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_a_photo_is_taken_as_prepare_would_store_it_and_deleted(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x8825] = {1: "N", 2: (10.0, 0.0, 0.0), 3: "E", 4: (20.0, 0.0, 0.0)}
    out = io.BytesIO()
    Image.new("RGB", (400, 300)).save(out, "JPEG", exif=exif)
    path = sent(tmp_path, out.getvalue())
    upload = take(path, tmp_path, SMALL)
    assert upload.gps == (10.0, 20.0)
    assert open_upright(upload.jpeg).size == (160, 128)
    assert b"Exif" not in upload.jpeg
    assert not Path(path).exists()


def test_equal_photos_have_equal_keys(tmp_path: Path) -> None:
    keys = [take(sent(tmp_path, make_jpeg(n)), tmp_path, SMALL).key for n in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("content", [b"", b"no photo", make_jpeg(1)[:300]])
def test_what_is_no_photo_is_deleted_too(content: bytes, tmp_path: Path) -> None:
    path = sent(tmp_path, content)
    with pytest.raises(BadImageError):
        take(path, tmp_path, SMALL)
    assert not Path(path).exists()


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_drop, "MAX_BYTES", 100)
    path = sent(tmp_path, make_jpeg(1))
    with pytest.raises(BadImageError, match="larger than"):
        take(path, tmp_path, SMALL)
    assert not Path(path).exists()


def test_files_elsewhere_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(make_jpeg(1))
    (uploads / "link.jpg").symlink_to(secret)
    for path in (
        str(secret), f"{uploads}/../secret.jpg", f"{uploads}/link.jpg", str(uploads), "", "\0",
        "x" * 9999, None, 7, ["a"], {"path": str(secret)},
    ):  # fmt: skip
        with pytest.raises(BadImageError, match="did not arrive"):
            take(path, uploads, SMALL)
    assert secret.exists()
