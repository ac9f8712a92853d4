"""URLs of object storage, and the folders of this machine for them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

from ngsgd.errors import ConfigError
from ngsgd.files import cache_folder

SCHEMES = ("s3", "gs", "az")


def is_url(text: str) -> bool:
    """Whether a path of the configuration or the command line names object storage."""
    return "://" in text


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` names a bucket, without credentials."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{parts.scheme}:// URLs are not supported; use "
                          f"{'://, '.join(SCHEMES)}:// or a path without file://.")
    if not parts.hostname:
        raise ConfigError(f"{url} names no bucket; write {parts.scheme}://BUCKET/FOLDER.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"a {parts.scheme}:// URL may contain only the bucket and a folder; set credentials in the environment.")


def local_root(output_dir: str) -> Path:
    """The folder of this machine for an output directory: itself, or a cache if it is a URL."""
    return cache_root("object-storage", output_dir) if is_url(output_dir) else Path(output_dir)


def cache_root(purpose: str, url: str) -> Path:
    """The folder of this machine for the content of a URL."""
    return cache_folder(purpose) / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
