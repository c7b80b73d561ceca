"""The queue of jobs: an SQLite file that records every job before it is accepted, and every change of its status.

Fair over owners by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with images as packets: an owner's
image begins at the virtual time up to which the owner has used the ranks, and the earliest one goes first. One owner
with a thousand jobs delays another one's first image by one image, not by a thousand. Priorities count among the
jobs of one owner, and deadlines among those of one priority.
"""

from __future__ import annotations

import contextlib
import heapq
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...errors import InputError
from ..errors import IdempotencyKey, KeyReused, QueueFull, UnknownJob
from ..settings import ServiceSettings
from ..types import Job, JobError, JobImage, JobRequest, Status
from .database import QueueDatabase
from .rows import as_job, job_row, read_job

# Seconds after which a client should retry when too many images wait.
RETRY_SECONDS = 5.0

# Which image is next: of jobs that ranks have failed under; then of the owner who has had the least; of that owner
# the most urgent (`_urgency`). Priorities and deadlines order their owner's jobs: any client may ask for the highest,
# and the earliest.
ORDER = "j.attempt > 1 DESC, max(coalesce(o.used, 0), c.value), "
WAITING = (
    "FROM jobs j LEFT JOIN owners o ON o.owner = j.owner JOIN facts c ON c.name = 'clock' "
    "WHERE j.waiting > 0 AND j.status IN ('queued', 'running')"
)


@dataclass(frozen=True)
class NextJob:
    """The job with the next image.

    Attributes:
        again: ranks have failed under it.
        since: when it was accepted, in seconds since 1970.
    """

    id: str
    model: str
    again: bool
    since: float


class Queue:
    """Jobs and their states, in a folder that one process at a time may use.

    Every method that changes something is one transaction, on disk (``synchronous=FULL``) when it returns, so that the
    process may be killed at any moment: images that were under way wait again at the next start, their jobs' attempts
    not counted. Any thread may call.

    Attributes:
        unread: jobs that waited with requests that this version cannot read; they have failed.
        run: how often the folder has been opened.
        queued, running: numbers of jobs.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: ServiceSettings | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder, and put the running images back into the queue.

        Args:
            folder: made if it is not there.
            settings: how many images may wait, and for how long a job is remembered after its end.
            now: seconds since 1970.

        Raises:
            ConfigError: another server uses the folder, or the queue in it is of another version.
            StorageError: it cannot be written.
        """
        settings = settings or ServiceSettings()
        self.keep, self.most, self.most_per_owner = settings.keep, settings.max_queue, settings.max_per_owner
        self._weights, self._now = settings.weights or {}, now
        self.unread: list[str] = []
        self.queued = self.running = 0
        self._database = QueueDatabase(folder, now)
        self.folder = self._database.folder
        try:
            with self._change() as db:
                db.execute("UPDATE facts SET value = value + 1 WHERE name = 'runs'")
                self.run = int(db.execute("SELECT value FROM facts WHERE name = 'runs'").fetchone()[0])
                _give_back(db, "job IN (SELECT number FROM jobs)")
                self._set_aside(db)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the folder for other processes."""
        self._database.close()

    @property
    def aside(self) -> Path | None:
        """Where a queue that could not be read was moved, with its results; None: all was well."""
        return self._database.aside

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: at its end all of it is on disk, or none; then ``queued`` and ``running`` count it."""
        with self._database.lock:
            with self._database.change() as db:
                yield db
                counted = "SELECT status, count(*) FROM jobs WHERE status IN ('queued', 'running') GROUP BY status"
                counts = dict(db.execute(counted).fetchall())
            self.queued, self.running = counts.get("queued", 0), counts.get("running", 0)

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._database.lock:
            return self._database.connection.execute(query, values).fetchall()

    def _set_aside(self, db: sqlite3.Connection) -> None:
        """Fail waiting jobs that cannot be read; their rows stay unchanged for a later version."""
        live = "SELECT * FROM jobs WHERE status IN ('queued', 'running')"
        for row in db.execute(live).fetchall():
            try:
                JobRequest.model_validate_json(row["request"])
            except ValidationError as problem:
                first = problem.errors()[0]
                where = ".".join(map(str, first["loc"]))
                why = f"field {where!r} is not known" if first["type"] == "extra_forbidden" else "it is not readable"
                message = f"this version of the server cannot run the job as requested ({why}); submit it again"
                error = JobError(code="invalid_request", message=message)
                db.execute("UPDATE jobs SET error = ? WHERE number = ?", (error.model_dump_json(), row["number"]))
                self._end(db, row, "failed")
                self.unread.append(row["id"])

    # ---- the life of a job

    def submit(
        self,
        id: str,
        request: JobRequest,
        owner: str,
        work: float,
        key: IdempotencyKey | None = None,
    ) -> Job:
        """Accept a job: it is on disk when this returns. A repeated request returns its job.

        Args:
            request: with its model and seed.
            work: of one image, in any unit.
            key: see `repeated`.

        Raises:
            InputError: it asks for more images than may ever wait.
            QueueFull: too many images wait.
            StorageError: it cannot be written down.
            KeyReused: the key belongs to another request.
        """
        most = min(self.most, self.most_per_owner) if owner else self.most
        if request.n > most:
            raise InputError(f"n {request.n} is more than the {most} images that may wait; use n {most} at most")
        with self._change() as db:
            if key is not None and (before := self._repeated(db, owner, key)) is not None:
                return before
            self._check_bounds(db, request.n, owner)
            now = self._now()
            due = None if request.deadline_ms is None else now + request.deadline_ms / 1000
            number = db.execute(
                "INSERT INTO jobs (id, owner, status, model, priority, request, n, work, waiting, created, due) "
                "VALUES (?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(id, owner, request.model, request.priority, request.model_dump_json()),
                    *(request.n, work, request.n, now, due),
                ),
            ).lastrowid
            digests = {given.digest for given in request.inputs}
            db.executemany("INSERT INTO inputs VALUES (?, ?)", [(digest, number) for digest in digests])
            if key is not None:
                db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)", (owner, key.key, key.digest, number))
            return read_job(db, id)

    def repeated(self, owner: str, key: IdempotencyKey) -> Job | None:
        """The job that was accepted with this key, unless it was cancelled, which frees the key.

        A key is remembered as long as its job.

        Raises:
            KeyReused: it came with another request.
        """
        with self._database.lock:
            return self._repeated(self._database.connection, owner, key)

    def _repeated(self, db: sqlite3.Connection, owner: str, key: IdempotencyKey) -> Job | None:
        row = db.execute(
            "SELECT j.*, k.digest FROM keys k JOIN jobs j ON j.number = k.job "
            "WHERE k.owner = ? AND k.key = ? AND j.status != 'cancelled'",
            (owner, key.key),
        ).fetchone()
        if row is not None and row["digest"] != key.digest:
            raise KeyReused(f"Idempotency-Key {key.key!r} came with another request before; use a new key for this one")
        return row and as_job(db, row)

    def _check_bounds(self, db: sqlite3.Connection, n: int, owner: str) -> None:
        live = (
            "SELECT coalesce(sum(n), 0) - (SELECT count(*) FROM pictures p JOIN jobs q ON q.number = p.job WHERE "
            "p.file IS NOT NULL AND q.status IN ('queued', 'running') {also}) "
            "FROM jobs q WHERE q.status IN ('queued', 'running') {also}"
        )
        everyone = db.execute(live.format(also="")).fetchone()[0]
        mine = db.execute(live.format(also="AND q.owner = ?"), (owner, owner)).fetchone()[0] if owner else 0
        if everyone + n > self.most:
            raise QueueFull(f"{everyone} images wait already, and {self.most} may; ask again later", RETRY_SECONDS)
        if owner and mine + n > self.most_per_owner:
            message = f"{mine} images of yours wait already, and {self.most_per_owner} may; ask again later"
            raise QueueFull(message, RETRY_SECONDS)

    def head(self, models: Collection[str] | None = None, job: str | None = None, again: bool = True) -> NextJob | None:
        """The job with the image that begins next.

        Args:
            models: only jobs of these.
            job: only this one.
            again: also those that ranks have failed under.
        """
        query, values = f"SELECT j.id, j.model, j.attempt, j.created {WAITING}", []
        if models is not None:
            query += f" AND j.model IN ({', '.join('?' * len(models))})"
            values += models
        if job is not None:
            query, values = f"{query} AND j.id = ?", [*values, job]
        if not again:
            query += " AND j.attempt = 1"
        for row in self._rows(f"{query} ORDER BY {ORDER}{_urgency(self._now())} LIMIT 1", *values):
            return NextJob(row["id"], row["model"], row["attempt"] > 1, row["created"])
        return None

    def begin(self, id: str) -> int | None:
        """Begin a job's next image, and charge its owner; the image's number, or None if none waits."""
        with self._change() as db:
            job = job_row(db, id)
            if job is None or not job["waiting"]:
                return None
            # The virtual time: the least use of any waiting owner. A new owner starts there.
            (clock,) = db.execute(f"SELECT min(max(coalesce(o.used, 0), c.value)) {WAITING}").fetchone()
            begun = {row[0] for row in db.execute("SELECT picture FROM pictures WHERE job = ?", (job["number"],))}
            picture = next(one for one in range(job["n"]) if one not in begun)
            db.execute("INSERT INTO pictures (job, picture) VALUES (?, ?)", (job["number"], picture))
            db.execute(
                "UPDATE jobs SET waiting = waiting - 1, status = 'running', started = coalesce(started, ?) "
                "WHERE number = ?",
                (self._now(), job["number"]),
            )
            db.execute("UPDATE facts SET value = ? WHERE name = 'clock'", (clock,))
            used = db.execute("SELECT used FROM owners WHERE owner = ?", (job["owner"],)).fetchone()
            self._charge(db, job, max(clock, used[0] if used else 0.0), 1.0)
        return picture

    def _charge(self, db: sqlite3.Connection, job: sqlite3.Row, start: float, pictures: float) -> None:
        used = start + pictures * job["work"] / self._weights.get(job["owner"], 1.0)
        db.execute(
            "INSERT INTO owners VALUES (?, ?) ON CONFLICT DO UPDATE SET used = excluded.used", (job["owner"], used)
        )

    def _refund(self, db: sqlite3.Connection, job: sqlite3.Row, pictures: float) -> None:
        """Refund an owner for the part of images that was not generated."""
        used = db.execute("SELECT used FROM owners WHERE owner = ?", (job["owner"],)).fetchone()
        if used is not None and pictures:
            self._charge(db, job, used[0], -pictures)

    def finish(self, id: str, picture: int, file: str, image: JobImage) -> Job | None:
        """Record a finished image with its file; the job, or None if the image is not needed any more."""
        with self._change() as db:
            if (job := job_row(db, id, "running")) is None:
                return None
            update = "UPDATE pictures SET file = ?, image = ? WHERE job = ? AND picture = ? AND file IS NULL"
            if not db.execute(update, (file, image.model_dump_json(), job["number"], picture)).rowcount:
                return None
            done = "SELECT count(*) FROM pictures WHERE job = ? AND file IS NOT NULL"
            if db.execute(done, (job["number"],)).fetchone()[0] == job["n"]:
                self._end(db, job, "succeeded")
            return read_job(db, id)

    def fail(self, id: str, error: JobError) -> Job | None:
        """Record a failed job; None if it has ended already."""
        with self._change() as db:
            if (job := job_row(db, id, "queued", "running")) is None:
                return None
            db.execute("UPDATE jobs SET error = ? WHERE number = ?", (error.model_dump_json(), job["number"]))
            self._end(db, job, "failed")
            return read_job(db, id)

    def cancel(self, id: str, done: Sequence[float] = ()) -> Job | None:
        """Record a cancelled job; None if it has ended already.

        Args:
            done: of each of its images under way the part that is done, from 0 to 1.
        """
        with self._change() as db:
            if (job := job_row(db, id, "queued", "running")) is None:
                return None
            self._refund(db, job, sum(1 - part for part in done))
            self._end(db, job, "cancelled")
            return read_job(db, id)

    def interrupt(self, id: str, pictures: Collection[int], counts: bool = True) -> Job | None:
        """Put lost running images back into the queue; None if the job has ended already.

        Args:
            pictures: their numbers.
            counts: this is another attempt.
        """
        with self._change() as db:
            if (job := job_row(db, id, "running")) is None:
                return None
            numbers = ", ".join(str(int(picture)) for picture in pictures)
            back = _give_back(db, f"job = {job['number']} AND picture IN ({numbers})")
            self._refund(db, job, back)
            if counts:
                db.execute("UPDATE jobs SET attempt = attempt + 1 WHERE number = ?", (job["number"],))
            return read_job(db, id)

    def _end(self, db: sqlite3.Connection, job: sqlite3.Row, status: Status) -> None:
        now = self._now()
        db.execute(
            "UPDATE jobs SET status = ?, waiting = 0, finished = ?, expires = ? WHERE number = ?",
            (status, now, now + self.keep, job["number"]),
        )
        db.execute("DELETE FROM pictures WHERE job = ? AND file IS NULL", (job["number"],))

    # ---- reading

    def job(self, id: str, owner: str | None = None) -> Job:
        """A job; ``owner``: only if it belongs to this owner.

        Raises:
            UnknownJob: there is none.
        """
        with self._database.lock:
            db = self._database.connection
            row = job_row(db, id)
            if row is None or owner not in (None, row["owner"]):
                raise UnknownJob(f"there is no job {id[:80]!r}, or it has expired")
            return as_job(db, row)

    def jobs(self, owner: str, limit: int = 50, status: Status | None = None) -> list[Job]:
        """An owner's jobs, the newest first."""
        query, values = "SELECT * FROM jobs WHERE owner = ?", [owner]
        if status is not None:
            query, values = f"{query} AND status = ?", [owner, status]
        with self._database.lock:
            db = self._database.connection
            rows = db.execute(f"{query} ORDER BY number DESC LIMIT ?", (*values, limit)).fetchall()
            return [as_job(db, row) for row in rows]

    def live(self) -> list[tuple[Job, str]]:
        """Jobs that have not ended, and their owners, the oldest first."""
        query = "SELECT * FROM jobs WHERE status IN ('queued', 'running') ORDER BY number"
        with self._database.lock:
            db = self._database.connection
            return [(as_job(db, row), row["owner"]) for row in db.execute(query).fetchall()]

    def file(self, id: str, picture: int) -> str | None:
        """The name of an image's file."""
        query = "SELECT p.file FROM pictures p JOIN jobs j ON j.number = p.job WHERE j.id = ? AND p.picture = ?"
        return next((row["file"] for row in self._rows(query, id, picture)), None)

    def places(self) -> dict[str, int]:
        """How many queued jobs are before each queued job, if no other jobs arrive."""
        query = (
            "SELECT j.id, j.owner, j.status, j.attempt > 1 AS again, j.work, j.waiting, "
            f"max(coalesce(o.used, 0), c.value) AS used {WAITING} "
            f"ORDER BY j.attempt > 1 DESC, {_urgency(self._now())}"
        )
        rows = self._rows(query)
        used = {row["owner"]: row["used"] for row in rows}
        places: dict[str, int] = {}
        for again in (1, 0):
            lines: dict[str, deque[tuple[int, sqlite3.Row]]] = {}
            for number, row in enumerate(rows):
                if row["again"] == again:
                    lines.setdefault(row["owner"], deque()).extend([(number, row)] * row["waiting"])
            heap = [(used[owner], line[0][0], owner) for owner, line in lines.items()]
            heapq.heapify(heap)
            while heap:
                _, _, owner = heapq.heappop(heap)
                line = lines[owner]
                _, row = line.popleft()
                if row["status"] == "queued":
                    places.setdefault(row["id"], len(places))
                used[owner] += row["work"] / self._weights.get(owner, 1.0)
                if line:
                    heapq.heappush(heap, (used[owner], line[0][0], owner))
        return places

    # ---- expiry

    def expired(self) -> list[str]:
        """Jobs that have expired."""
        return [row[0] for row in self._rows("SELECT id FROM jobs WHERE expires <= ?", self._now())]

    def oldest(self, number: int) -> list[str]:
        """The jobs with results that ended earliest."""
        query = (
            "SELECT id FROM jobs WHERE expires IS NOT NULL AND EXISTS (SELECT 1 FROM pictures WHERE job = number) "
            "ORDER BY expires LIMIT ?"
        )
        return [row[0] for row in self._rows(query, number)]

    def surplus(self, number: int, without_results: bool = False) -> list[str]:
        """The jobs that ended earliest, beyond ``number`` to keep; of all, or of those without results."""
        which = " AND NOT EXISTS (SELECT 1 FROM pictures WHERE job = number)" if without_results else ""
        query = f"SELECT id FROM jobs WHERE expires IS NOT NULL{which} ORDER BY expires DESC LIMIT -1 OFFSET ?"
        return [row[0] for row in self._rows(query, number)]

    def forget(self, ids: Collection[str]) -> None:
        """Remove ended jobs, and owners without jobs or charges."""
        with self._change() as db:
            db.executemany("DELETE FROM jobs WHERE id = ? AND expires IS NOT NULL", [(id,) for id in ids])
            db.execute(
                "DELETE FROM owners WHERE used <= (SELECT value FROM facts WHERE name = 'clock') "
                "AND owner NOT IN (SELECT owner FROM jobs WHERE status IN ('queued', 'running'))"
            )

    def ids(self) -> set[str]:
        """Ids of all jobs."""
        return {row[0] for row in self._rows("SELECT id FROM jobs")}

    def needs(self, digest: str, owner: str | None = None) -> bool:
        """True if a job has this input; ``owner``: one of this owner's."""
        query = "SELECT 1 FROM inputs i JOIN jobs j ON j.number = i.job WHERE i.digest = ?"
        rest = [] if owner is None else [owner]
        return bool(self._rows(f"{query}{' AND j.owner = ?' * len(rest)} LIMIT 1", digest, *rest))

    def inputs(self) -> set[str]:
        """Digests of the inputs of all jobs."""
        return {row[0] for row in self._rows("SELECT DISTINCT digest FROM inputs")}


def _urgency(now: float) -> str:
    """The order of one owner's jobs: the highest priority, then the earliest deadline, then the oldest job.

    A job that is late waits like one without a deadline: before others it would make those late as well.
    """
    due = f"CASE WHEN j.due > {now!r} THEN j.due END"
    return f"j.priority DESC, {due} IS NULL, {due}, j.number"


def _give_back(db: sqlite3.Connection, which: str) -> int:
    """Put unfinished images back into the queue; returns their number."""
    which = f"file IS NULL AND {which}"
    waiting = f"SELECT count(*) FROM pictures WHERE job = jobs.number AND {which}"
    db.execute(f"UPDATE jobs SET waiting = waiting + ({waiting}) WHERE status = 'running'")
    back = db.execute(f"DELETE FROM pictures WHERE {which}").rowcount
    db.execute(
        "UPDATE jobs SET status = 'queued' WHERE status = 'running' "
        "AND NOT EXISTS (SELECT 1 FROM pictures WHERE job = jobs.number)"
    )
    return back
