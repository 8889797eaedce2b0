"""JSON files that appear whole or not at all, stamped with what they hold and in which format version."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from acwb.errors import AcwbError

FORMAT_VERSION = 1


def write(path: str | os.PathLike[str], kind: str, content: dict[str, Any]) -> None:
    """Write `content` to `path`, replacing what was there only once the new file is complete."""
    target = Path(path)
    text = json.dumps({"kind": kind, "version": FORMAT_VERSION, **content}, indent=1)
    try:
        descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise AcwbError(
            f"Cannot write {target}: {error.strerror}. Choose a folder that exists and that you may write to."
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(target)
    except OSError as error:
        raise AcwbError(f"Cannot write {target}: {error.strerror}.") from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def read(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read back what `write` wrote, and refuse anything else in a sentence."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise AcwbError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise AcwbError(f"{path} is not a whole JSON file ({error}): save the {kind} again.") from error
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise AcwbError(
            f"{path} holds {found or 'something else'}, not a {kind}: choose a file that {kind}.save wrote."
        )
    if content.get("version") != FORMAT_VERSION:
        raise AcwbError(
            f"{path} was written in format version {content.get('version')}, but this acwb reads version "
            f"{FORMAT_VERSION}: save the {kind} again."
        )
    return dict(content)
