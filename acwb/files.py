"""Files that appear whole or not at all; JSON ones are stamped with what they hold and in which format version."""

import csv
import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import pandas
from acwb.errors import AcwbError

FORMAT_VERSION = 1
DECIMAL = "%.7g"  # of numbers in CSV files, which people read: microseconds in a step of seconds; JSON keeps every bit


def write_saved(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as JSON, replacing what was there only once the new file is complete."""
    write_texts({path: json.dumps({"kind": kind, "version": FORMAT_VERSION, **content})})


def rows_as_csv(data: Iterable[Mapping[Any, Any]]) -> str:
    """Rows as the text of a CSV file; a column is there if any row has it."""
    rows = list(data)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows({key: _rounded(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _rounded(value: Any) -> Any:
    return DECIMAL % value if isinstance(value, float) and not value.is_integer() else value


def make_folder(folder: Path) -> None:
    """Make a folder that may be there already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AcwbError(
            f"Cannot write to {folder}: {error.strerror}. Choose a folder that you may write to."
        ) from error


def write_frames(frames: Mapping[Path, "pandas.DataFrame"]) -> None:
    """Write each frame to its path as CSV, all or none."""
    write_texts({path: frame.to_csv(index=False, float_format=DECIMAL) for path, frame in frames.items()})


def write_texts(texts: Mapping[str | os.PathLike[str], str]) -> None:
    """Write each text to its path; nothing is replaced before all of them are complete on disk."""
    with ExitStack() as undo:
        scratches = {Path(path): _scratch(Path(path), text, undo) for path, text in texts.items()}
        for target, scratch in scratches.items():
            try:
                scratch.replace(target)
            except OSError as error:
                raise AcwbError(f"Cannot write {target}: {error.strerror}.") from error


def _scratch(target: Path, text: str, undo: ExitStack) -> Path:
    """A complete file beside `target`, which `undo` removes if it is still there."""
    if target.is_dir():
        raise AcwbError(f"Cannot write {target}: it is a folder. Choose another name.")
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        scratch = Path(name)
        undo.callback(scratch.unlink, missing_ok=True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.chmod(0o644)
    except OSError as error:
        raise AcwbError(
            f"Cannot write {target}: {error.strerror}. Choose a folder that exists and that you may write to."
        ) from error
    return scratch


class Saved:
    """A frozen dataclass that goes to a JSON file and back, whole.

    Attributes:
        KIND: the word by which a file says what it holds; it stays, whatever the class is called.
    """

    KIND: ClassVar[str]

    def content(self) -> dict[str, Any]:
        """The fields as plain values, for a file."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]  # every subclass is a dataclass

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The value that `content` came from."""
        return cls(**content)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file; it appears whole or not at all."""
        write_saved(path, self.KIND, self.content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote."""
        with open_saved(path, cls.KIND) as content:
            return cls.of(content)


@contextmanager
def open_saved(path: str | os.PathLike[str], kind: str) -> Iterator[dict[str, Any]]:
    """The content of a file that `write_saved` wrote; whatever cannot be made of it is refused in a sentence."""
    content = read_saved(path, kind)
    try:
        yield content
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AcwbError(f"{path} is not a {kind} that this acwb can read ({error!r}): save it again.") from error


def read_saved(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read back what `write_saved` wrote, and refuse anything else in a sentence."""
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
