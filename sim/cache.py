# SPDX-License-Identifier: Apache-2.0
"""The cache of emitted Verilog and built simulations: `$JALAPENO_CACHE`, else `jalapeno` in the
user's cache.

An entry is a directory named after a hash of everything that it is made from. It appears by one
rename when it is complete, under a file lock, so half-made entries do not count and processes may
share it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from sim.errors import InputError


def root() -> Path:
    """The cache's directory (it need not exist)."""
    if place := os.environ.get("JALAPENO_CACHE"):
        return Path(place).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "jalapeno"


def check_usable() -> None:
    """InputError when the cache's directory cannot be made or written."""
    place = root()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InputError(
            "JALAPENO_CACHE",
            str(place),
            f"it cannot be written ({error.strerror})",
            "name a directory of yours",
        ) from None


def digest(parts: Iterable[str]) -> str:
    """Hash of `parts`, in order; no two different sequences share one."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:32]


def entry(kind: str, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """Directory of entry `key` of `kind`, and whether it was there before.

    When it is not there, `make` fills an empty directory. If that raises, the directory stays
    beside the entry as `key.failed` until the next attempt, for its logs.
    """
    place = root() / kind
    final, failed = place / key, place / f"{key}.failed"
    if final.is_dir():
        return final, True
    check_usable()
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / f"{key}.lock"):
        if final.is_dir():
            return final, True
        # The lock is ours, so what lies here was left by a process that was killed.
        for left in place.glob(f"{key}.*/"):
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=place))
        try:
            make(work)
        except BaseException:
            work.rename(failed)
            raise
        work.rename(final)
    return final, False
