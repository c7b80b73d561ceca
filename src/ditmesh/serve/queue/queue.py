"""The queue of jobs: an SQLite file that records every job before it is accepted, and every change of its status.

Fair over owners by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with images as packets: an owner's
image begins at the virtual time up to which the owner has used the ranks, and the earliest one goes first. One owner
with a thousand jobs delays another one's first image by one image, not by a thousand. Priorities count among the
jobs of one owner, and deadlines among those of one priority.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..errors import QueueFull, UnknownJob
from ..settings import ServiceSettings
from ..types import Job, JobError, JobImage, JobRequest, Status
from .database import QueueDatabase

# Seconds after which a client should retry when too many images wait.
RETRY_SECONDS = 5.0
# The most kinds of images (model and work) whose seconds are kept: clients choose sizes and steps.
MOST_KINDS = 1000

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
        left: seconds until its deadline, if that can still be met.
        seconds: of the fastest image of its kind; 0: not known.
    """

    id: str
    again: bool
    left: float | None
    seconds: float


class Queue:
    """Jobs and their states, in a folder that one process at a time may use.

    Every method that changes something is one transaction, on disk (``synchronous=FULL``) when it returns, so that the
    process may be killed at any moment: images that were under way wait again at the next start, their jobs' attempts
    not counted. Any thread may call.

    Attributes:
        run: how often the folder has been opened.
        queued, running: numbers of jobs.
    """

    def __init__(
        self, folder: str | Path, settings: ServiceSettings | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Open the folder, which is made if need be, and put the running images back into the queue.

        Raises `ConfigError`, `StorageError`: as `QueueDatabase`.
        """
        settings = settings or ServiceSettings()
        self.keep, self.most, self.most_per_owner = settings.keep, settings.max_queue, settings.max_per_owner
        self._now = now
        self.queued = self.running = 0
        self._database = QueueDatabase(folder)
        self.folder = self._database.folder
        # When images under way began, by job and number; seconds of the fastest images, by model and work.
        self._begun: dict[tuple[str, int], float] = {}
        self._seconds: dict[tuple[str, float], float] = {}
        self._database.connection.create_function("seconds", 2, lambda *kind: self._seconds.get(kind, 0.0))
        try:
            with self._change() as db:
                db.execute("UPDATE facts SET value = value + 1 WHERE name = 'runs'")
                self.run = int(db.execute("SELECT value FROM facts WHERE name = 'runs'").fetchone()[0])
                _give_back(db, "job IN (SELECT number FROM jobs)")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the folder for other processes."""
        self._database.close()

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

    # ---- the life of a job

    def submit(self, id: str, request: JobRequest, owner: str, work: float) -> Job:
        """Accept a job: it is on disk when this returns.

        Args:
            request: with its model and seed.
            work: of one image, in any unit.

        Raises:
            InputError, QueueFull: too many images wait, or would even in an empty queue.
            StorageError: it cannot be written down.
        """
        most = min(self.most, self.most_per_owner) if owner else self.most
        if request.n > most:
            raise InputError(f"n {request.n} is more than the {most} images that may wait; use n {most} at most")
        live = (
            "SELECT coalesce(sum(n), 0) - (SELECT count(*) FROM pictures p JOIN jobs q ON q.number = p.job WHERE "
            "p.file IS NOT NULL AND q.status IN ('queued', 'running') {also}) "
            "FROM jobs q WHERE q.status IN ('queued', 'running') {also}"
        )
        n = request.n
        with self._change() as db:
            everyone = db.execute(live.format(also="")).fetchone()[0]
            mine = db.execute(live.format(also="AND q.owner = ?"), (owner, owner)).fetchone()[0] if owner else 0
            if everyone + n > self.most:
                raise QueueFull(f"{everyone} images wait already, and {self.most} may; ask again later", RETRY_SECONDS)
            if owner and mine + n > self.most_per_owner:
                message = f"{mine} images of yours wait already, and {self.most_per_owner} may; ask again later"
                raise QueueFull(message, RETRY_SECONDS)
            now = self._now()
            due = None if request.deadline_ms is None else now + request.deadline_ms / 1000
            db.execute(
                "INSERT INTO jobs (id, owner, status, model, priority, request, n, work, waiting, created, due) "
                "VALUES (?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?)",
                (id, owner, request.model, request.priority, request.model_dump_json(), n, work, n, now, due),
            )
            return read_job(db, id)

    def head(self, job: str | None = None) -> NextJob | None:
        """The job with the image that begins next; ``job``: only this one."""
        now = self._now()
        values = []
        query = f"SELECT j.id, j.attempt > 1, {_in_time(now)}, seconds(j.model, j.work) {WAITING}"
        if job is not None:
            query, values = f"{query} AND j.id = ?", [job]
        rows = self._rows(f"{query} ORDER BY {ORDER}{_urgency(now)} LIMIT 1", *values)
        if not rows:
            return None
        id, again, due, seconds = rows[0]
        return NextJob(id, bool(again), None if due is None else due - now, seconds)

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
            self._begun[id, picture] = self._now()
        return picture

    def _charge(self, db: sqlite3.Connection, job: sqlite3.Row, start: float, pictures: float) -> None:
        used = start + pictures * job["work"]
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
            if (begun := self._begun.pop((id, picture), None)) is not None:
                if len(self._seconds) > MOST_KINDS:
                    self._seconds.clear()
                kind, seconds = (job["model"], job["work"]), self._now() - begun
                self._seconds[kind] = min(self._seconds.get(kind, seconds), seconds)
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
        for picture in range(job["n"]):
            self._begun.pop((job["id"], picture), None)

    # ---- reading

    def job(self, id: str, owner: str | None = None) -> Job:
        """A job; ``owner``: only if it belongs to this owner. Raises `UnknownJob`: there is none."""
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
        # Where fair queueing begins a job's next image: after the work that its owner has used, and has before it.
        urgency = f"j.attempt > 1 DESC, {_urgency(self._now())}"
        query = (
            "SELECT j.id, j.status, j.attempt > 1 AS again, max(coalesce(o.used, 0), c.value) + "
            f"sum(j.work * j.waiting) OVER (PARTITION BY j.owner ORDER BY {urgency}) - j.work * j.waiting AS start, "
            f"row_number() OVER (ORDER BY {urgency}) AS turn {WAITING} ORDER BY again DESC, start, turn"
        )
        queued = [row["id"] for row in self._rows(query) if row["status"] == "queued"]
        return {id: place for place, id in enumerate(queued)}

    # ---- expiry

    def expired(self) -> list[str]:
        """Jobs that have expired."""
        return [row[0] for row in self._rows("SELECT id FROM jobs WHERE expires <= ?", self._now())]

    def oldest(self, number: int) -> list[str]:
        """The jobs that ended earliest."""
        query = "SELECT id FROM jobs WHERE expires IS NOT NULL ORDER BY expires LIMIT ?"
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

    def job_with_input(self, digest: str, owner: str) -> str | None:
        """The id of one of the owner's jobs with this input image; None: there is none."""
        rows = self._rows("SELECT id FROM jobs WHERE owner = ? AND instr(request, ?) LIMIT 1", owner, digest)
        return rows[0]["id"] if rows else None


def job_row(db: sqlite3.Connection, id: str, *statuses: Status) -> sqlite3.Row | None:
    """A job's row, if the job has one of the statuses (none: any)."""
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (id,)).fetchone()
    return row if row is None or not statuses or row["status"] in statuses else None


def read_job(db: sqlite3.Connection, id: str) -> Job:
    """A job that is there."""
    row = job_row(db, id)
    assert row is not None
    return as_job(db, row)


def as_job(db: sqlite3.Connection, row: sqlite3.Row) -> Job:
    """The job of a row, with its images."""
    request = JobRequest.model_validate_json(row["request"])
    images = [JobImage(index=index, seed=(request.seed or 0) + index) for index in range(row["n"])]
    done = "SELECT picture, image FROM pictures WHERE job = ? AND file IS NOT NULL"
    for picture in db.execute(done, (row["number"],)):
        images[picture["picture"]] = JobImage.model_validate_json(picture["image"])
    return Job(
        request=request,
        images=images,
        error=JobError.model_validate_json(row["error"]) if row["error"] else None,
        **{name: row[name] for name in ("id", "status", "created", "started", "finished", "expires", "attempt")},
    )


def _urgency(now: float) -> str:
    """The order of one owner's jobs: the highest priority, then the earliest deadline, then the oldest job.

    A job that is late, or will be by the seconds of the fastest image like its own, waits like one without a deadline:
    before others it would make those late as well.
    """
    return f"j.priority DESC, {_in_time(now)} IS NULL, {_in_time(now)}, j.number"


def _in_time(now: float) -> str:
    """A job's deadline if it can still be met, else NULL."""
    return f"CASE WHEN j.due > {now!r} + seconds(j.model, j.work) THEN j.due END"


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
