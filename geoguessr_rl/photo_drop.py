"""A visitor's photo: from the file that a browser sent to what the model is shown.

The browser's half is `photo_drop.html` and `photo_drop.js`.

The file is deleted as soon as it is read. What stays, in the visitor's session, is the photo as
`prepare` would store it, without metadata, and apart from it where its EXIF says it was taken.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from geoguessr_rl.config import ImagePolicy
from geoguessr_rl.exif import read_gps
from geoguessr_rl.images import MAX_PIXELS, BadImageError, prepare

MAX_BYTES = 20_000_000
"""Of a file: phones write up to about 15 MB."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A photo that can be asked about.

    Attributes:
        jpeg: It as `prepare` stores it.
        gps: Latitude and longitude in decimal degrees from its EXIF, which no model is shown.
    """

    jpeg: bytes
    gps: tuple[float, float] | None

    @property
    def key(self) -> str:
        """What seeds are derived from, in the place of an id."""
        return sha256(self.jpeg).hexdigest()


def take(path: object, folder: Path, policy: ImagePolicy) -> Upload:
    """Reads a file that was just uploaded, and deletes it.

    Args:
        path: Where the page says that it lies; the page may say anything.
        folder: Where the server puts uploads.
        policy: The size of the model's photos.

    Raises:
        BadImageError: It is no upload, not a usable photo, or too large.
    """
    file = _arrived(path, folder.resolve())
    if file is None:
        raise BadImageError("it did not arrive; send it again")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise BadImageError(f"it is larger than {MAX_BYTES / 1e6:.0f} MB")
        data = file.read_bytes()
    finally:
        file.unlink()
    return Upload(prepare(data, policy, max_pixels=MAX_PIXELS).jpeg, read_gps(data))


def _arrived(path: object, folder: Path) -> Path | None:
    """Returns the file that a page names, where it is one below the server's folder."""
    if not isinstance(path, str):
        return None
    try:
        file = Path(path).resolve()
        return file if file.is_relative_to(folder) and file.is_file() else None
    except (OSError, ValueError):  # too long, or a null byte
        return None
