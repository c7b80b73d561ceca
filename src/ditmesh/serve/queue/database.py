"""The file of the queue: its tables, its lock, and transactions that are on disk when they end."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from ...core.files import lock_of
from ...errors import ConfigError
from ..errors import StorageError
from .storage import WAYS_OUT, storage_error

FILE, LOCK = "queue.sqlite", "lock"
# Of the file's tables and of the requests in them: raised when either changes (`tests/serve/test_serve_queue.py` holds
# them). And what says that the file is ours: "dmsh".
VERSION, APPLICATION = 2, 0x646D7368
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
CREATE TABLE owners (owner TEXT PRIMARY KEY, used REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT INTO facts VALUES ('clock', 0), ('runs', 0);
"""


class QueueDatabase:
    """An SQLite file in a folder that one process at a time may use.

    Nothing else in the process may open the file, not even to read it: closing it would release all locks of the
    process on it, SQLite's too.

    Attributes:
        connection: to the file; under ``lock``.
        lock: of the connection. Any thread may take it, and again.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the folder, which is made if it is not there.

        Raises:
            ConfigError: another server uses the folder, or the file is of another version.
            StorageError: it cannot be written, or the file is damaged.
        """
        self.folder, self.path = Path(folder), Path(folder) / FILE
        self.lock = threading.RLock()
        with contextlib.ExitStack() as stack:
            try:
                # Prompts and images are private to their owners.
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                lock = lock_of(self.folder / LOCK)
            except OSError as error:
                raise storage_error(f"cannot write to folder {str(folder)!r}", error) from None
            if lock is None:
                process = (self.folder / LOCK).read_text(encoding="utf-8")[:20].strip() or "unknown"
                raise ConfigError(
                    f"folder {str(folder)!r} is used by another server (process {process}); end that, or give another "
                    "folder"
                )
            # Held until this process ends in any way.
            stack.enter_context(lock)
            try:
                self.connection = sqlite3.connect(
                    self.path, LOCKED_SECONDS, isolation_level=None, check_same_thread=False
                )
                stack.callback(self.connection.close)
                self._prepare()
            except sqlite3.DatabaseError as error:
                raise storage_error(f"cannot open {self.path}", error) from error
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
                raise storage_error(f"cannot write to {self.path}", error) from error

    def _prepare(self) -> None:
        """Check the file, and make its tables if it is empty."""
        db = self.connection
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
            raise StorageError(f"{self.path} is damaged ({state}); {WAYS_OUT['broken']}", broken=True)
        db.execute("PRAGMA journal_mode = WAL")
        if not tables:
            stamp = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
            db.executescript(f"BEGIN; {TABLES} {stamp} COMMIT;")
