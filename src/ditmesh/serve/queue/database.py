"""The file of the queue: its tables, its lock, and transactions that are on disk when they end."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.files import free_names, lock_of
from ...errors import ConfigError
from .results import INPUTS, RESULTS
from .storage import failure_kind, storage_error

FILE, LOCK = "queue.sqlite", "lock"
# Of the file's tables and the JSON in them: raised when an older server must not touch them. A field of a request that
# is new does not raise it: older servers fail the jobs that have it, and keep all others. And what says that the file
# is ours: "dmsh".
VERSION, APPLICATION = 1, 0x646D7368
# Seconds to wait for a program that has locked the file.
LOCKED_SECONDS = 5.0

TABLES = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    model TEXT NOT NULL,
    priority INTEGER NOT NULL,
    request TEXT NOT NULL,
    n INTEGER NOT NULL,
    work REAL NOT NULL,
    waiting INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    created REAL NOT NULL,
    due REAL,
    started REAL,
    finished REAL,
    expires REAL,
    error TEXT
);
CREATE INDEX jobs_waiting ON jobs (priority) WHERE waiting > 0;
CREATE INDEX jobs_status ON jobs (status);
CREATE INDEX jobs_owner ON jobs (owner, number);
CREATE INDEX jobs_expires ON jobs (expires);
CREATE TABLE pictures (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    picture INTEGER NOT NULL,
    file TEXT,
    image TEXT,
    PRIMARY KEY (job, picture)
) WITHOUT ROWID;
CREATE TABLE inputs (
    digest TEXT NOT NULL,
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    PRIMARY KEY (digest, job)
) WITHOUT ROWID;
CREATE INDEX inputs_job ON inputs (job);
CREATE TABLE owners (owner TEXT PRIMARY KEY, used REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT INTO facts VALUES ('clock', 0), ('runs', 0);
"""

# Tables that a file of an earlier server may lack; it may lack the column `jobs.due` as well.
LATER_TABLES = """
CREATE TABLE IF NOT EXISTS keys (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    digest TEXT NOT NULL,
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    PRIMARY KEY (owner, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS keys_job ON keys (job);
"""


class QueueDatabase:
    """An SQLite file in a folder that one process at a time may use.

    Attributes:
        connection: to the file; under ``lock``.
        lock: of the connection. Any thread may take it, and again.
        aside: where a file that could not be read was moved, with the results; None: all was well.
    """

    def __init__(self, folder: str | Path, now: Callable[[], float]) -> None:
        """Open the folder, which is made if it is not there.

        Raises:
            ConfigError: another server uses the folder, or the file is of another version.
            StorageError: it cannot be written.
        """
        self.folder, self.path = Path(folder), Path(folder) / FILE
        self.lock = threading.RLock()
        self.aside: Path | None = None
        self._now = now
        with contextlib.ExitStack() as stack:
            try:
                # Prompts and images are private to their owners.
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                stack.enter_context(_locked(self.folder))
            except OSError as error:
                raise storage_error(f"cannot write to folder {str(folder)!r}", error) or error from None
            try:
                self.connection = self._open()
            except sqlite3.DatabaseError as error:
                if failure_kind(error) != "broken" and "malformed" not in str(error):
                    raise storage_error(f"cannot open {self.path}", error) or error from error
                self.aside = self._move_aside()
                self.connection = self._open()
            stack.callback(self.connection.close)
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close the folder for other processes."""
        with self.lock:
            self._resources.close()

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: at its end all of it is on disk, or none. Raises `StorageError`: it cannot be written."""
        with self.lock:
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self.connection
                    self.connection.execute("COMMIT")
                except BaseException:
                    if self.connection.in_transaction:
                        self.connection.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as error:
                raise storage_error(f"cannot write to {self.path}", error) or error from error

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, LOCKED_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA synchronous = FULL")
            version, ours = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id"))
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and (ours, version) != (APPLICATION, VERSION):
                writer = f"version {version}" if ours == APPLICATION else "another program"
                raise ConfigError(
                    f"{self.path} was written by {writer}, and this ditmesh has queues of version {VERSION}; move it "
                    "away, or give another folder"
                )
            (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(f"malformed: {state}")
            if tables:
                _use_log(db)
                columns = {row["name"] for row in db.execute("PRAGMA table_info(jobs)")}
                due = "" if "due" in columns else "ALTER TABLE jobs ADD COLUMN due REAL;"
                db.executescript(f"BEGIN; {LATER_TABLES} {due} COMMIT;")
            else:
                self._create(db)
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _create(db: sqlite3.Connection) -> None:
        """Make the tables of an empty file.

        No job has been accepted yet, so that one wait for the disk is enough instead of seven: on a busy disk each
        takes seconds, and the server answers no request before. It is for the file's first page, which says that
        there is a log: a log beside an empty file would be dropped. The tables are in the log, which the first change
        after them puts on disk, with the names of both files.

        SQLite does all of this. Nothing else in the process may open the file, not even to read it: closing it would
        release all locks of the process on it, SQLite's too, and the next program that looks into the file would take
        itself for the last one and remove the log.
        """
        stamp = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
        # The page is written without a file for its rollback: there is nothing to go back to.
        db.execute("PRAGMA journal_mode = MEMORY")
        _use_log(db)
        db.execute("PRAGMA synchronous = OFF")
        db.executescript(f"BEGIN; {TABLES} {LATER_TABLES} {stamp} COMMIT;")
        db.execute("PRAGMA synchronous = FULL")

    def _move_aside(self) -> Path:
        """Move an unreadable queue and its results into a separate folder."""
        stamp = time.strftime("broken-%Y%m%d-%H%M%S", time.gmtime(self._now()))
        aside = next(path for path in free_names(self.folder / stamp) if not path.exists())
        aside.mkdir()
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", RESULTS, INPUTS):
            if (path := self.folder / name).exists():
                path.rename(aside / name)
        return aside


def _use_log(db: sqlite3.Connection) -> None:
    """Let a file have a log; for this SQLite does not wait until no other program reads the file."""
    limit = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if failure_kind(error) != "locked" or time.monotonic() > limit:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, until it ends in any way."""
    file = lock_of(folder / LOCK)
    if file is None:
        who = (folder / LOCK).read_text(encoding="utf-8")[:20].strip() or "unknown"
        raise ConfigError(
            f"folder {str(folder)!r} is used by another server (process {who}); end that, or give another folder"
        )
    with file:
        yield
