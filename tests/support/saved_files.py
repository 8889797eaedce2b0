"""Files as older versions wrote them, without a checksum, so that what is checked beside it can be tested."""

import json
from pathlib import Path
from typing import Any


def content_of(path: Path) -> dict[str, Any]:
    """What a file holds, without its checksum."""
    content: dict[str, Any] = json.loads(path.read_text())
    del content["checksum"]
    return content


def without_checksum(path: Path) -> str:
    """The text of a file, without its checksum."""
    return json.dumps(content_of(path))
