"""Files that appear whole or not at all; JSON ones are stamped with kind, format version and a checksum.

A file keeps the mode that it had, a new one follows the umask, and a symbolic link is written through.
"""

import csv
import dataclasses
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import pandas
from acwb.errors import AcwbError, quoted
from acwb.value_checks import check_fields

FORMAT_VERSION = 1
DECIMAL = "%.7g"  # of numbers in CSV files, which people read: microseconds in a step of seconds; JSON keeps every bit


def write_saved(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as JSON, replacing what was there only once the new file is complete."""
    _refuse_no_path(path)
    stamped = {"kind": kind, "version": FORMAT_VERSION, **content}
    write_texts({path: json.dumps({**stamped, "checksum": _checksum(json.loads(json.dumps(stamped)))})})


def _checksum(content: Mapping[str, Any]) -> str:
    """Digest of what a file holds beside its checksum, however it is written down."""
    text = json.dumps({key: value for key, value in content.items() if key != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        targets = {_written_through(Path(path)): text for path, text in texts.items()}
        scratches = {target: _scratch(target, text, undo) for target, text in targets.items()}
        for target, scratch in scratches.items():
            try:
                scratch.replace(target)
            except OSError as error:
                raise AcwbError(f"Cannot write {target}: {error.strerror}.") from error


def _written_through(path: Path) -> Path:
    """The file that is to be replaced: where a symbolic link leads, not the link."""
    if "\0" in str(path):
        raise AcwbError(f"Cannot write {str(path)!r}: no file can have this name. Choose another one.")
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise AcwbError(f"Cannot write {path}: it is a link that leads nowhere. Choose another name.") from error


def _scratch(target: Path, text: str, undo: ExitStack) -> Path:
    """A complete file beside `target`, which `undo` removes if it is still there."""
    if target.is_dir():
        raise AcwbError(f"Cannot write {target}: it is a folder. Choose another name.")
    scratch = target.parent / f".acwb-{secrets.token_hex(8)}"
    try:
        former = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        undo.callback(scratch.unlink, missing_ok=True)
        with scratch.open("x", encoding="utf-8") as file:  # its mode follows the umask
            file.write(text)
        if former is not None:
            scratch.chmod(former)
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
            value = cls.of(content)
            check_fields(value)
            return value


@contextmanager
def open_saved(path: str | os.PathLike[str], kind: str) -> Iterator[dict[str, Any]]:
    """The content of a file that `write_saved` wrote; whatever cannot be made of it is refused in a sentence."""
    content = read_saved(path, kind)
    try:
        yield content
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise AcwbError(f"{path} is not a {kind} that this acwb can read ({reason}): save it again.") from error


def _refuse_no_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise AcwbError(f"{quoted(path)} is no path of a file: give text or a pathlib.Path.")


def read_saved(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read back what `write_saved` wrote, and refuse anything else in a sentence."""
    _refuse_no_path(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AcwbError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # NUL in the path
        raise AcwbError(f"Cannot read {str(path)!r}: {error}.") from error
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
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
    if "checksum" in content and content.pop("checksum") != _checksum(content):  # older files have none
        raise AcwbError(f"{path} was changed after it was saved: save the {kind} again.")
    return dict(content)
