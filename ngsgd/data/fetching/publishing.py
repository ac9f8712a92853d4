"""The coordinator's side: the files that it offers to nodes, and their objects in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ngsgd.counting import counted
from ngsgd.data.fetching.files import SharedFolder
from ngsgd.data.fetching.source import PREFIX, is_digest, is_sound
from ngsgd.errors import DataError
from ngsgd.files import sha256
from ngsgd.object_storage.client import ObjectStore


@dataclass(frozen=True)
class Offer:
    """A folder that workers can fetch, and the path of each of its files by SHA-256."""

    folder: SharedFolder
    paths: Mapping[str, Path]


def offer_of(directory: Path, roots: Iterable[str], listed: Mapping[str, str]) -> Offer:
    """Describe a folder of prepared data with an index, which gives the SHA-256 of `listed` files.

    Raises DataError if a file of `roots` (the index, and files that it does not list) cannot be
    read, or the index names a path or no SHA-256.
    """
    try:
        digests = {name: sha256(directory / name) for name in roots}
    except OSError as error:
        raise DataError(f"{directory} cannot be read ({error}); remove it and run again.") from error
    for name, digest in listed.items():
        if Path(name).name != name or name.startswith(".") or not is_digest(digest):
            raise DataError(f"the index of {directory} lists {name!r} with the checksum {digest!r}; remove {directory} and run "
                            "again.")
    paths = {digest: directory / name for name, digest in {**listed, **digests}.items()}
    return Offer(SharedFolder(str(directory), digests), paths)


def publish(offers: Iterable[Offer], store: ObjectStore, report: Callable[[str], object]) -> int:
    """Write the files that a bucket does not have, each as an object named by its SHA-256.

    Returns the number of objects that were written. Raises DataError if a file is damaged, and
    ObjectStorageError if the bucket cannot be written.
    """
    paths = {digest: path for offer in offers for digest, path in offer.paths.items()}
    there = store.sizes(PREFIX)
    missing = {digest: path for digest, path in paths.items() if there.get(PREFIX + digest) != _size(path)}
    if missing:
        total = sum(map(_size, missing.values()))
        report(f"writing {len(missing)} of {counted(len(paths), 'file')} of prepared data ({total / 1e6:.3g} MB) to "
               f"{store.url}/{PREFIX}")
    for digest, path in missing.items():
        if not is_sound(path, digest):
            raise DataError(f"{path} is missing or does not match its checksum; remove {path.parent} and run again.")
        if PREFIX + digest in there:
            # it is incomplete, because its name is not its content
            store.upload(PREFIX + digest, path)
        else:
            store.upload_new(PREFIX + digest, path)
    return len(missing)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # publishing reports it as missing
        return -1
