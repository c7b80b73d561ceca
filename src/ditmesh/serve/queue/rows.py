"""Jobs as the rows of the queue's file."""

from __future__ import annotations

import contextlib
import json
import sqlite3

from pydantic import ValidationError

from ..types import Job, JobError, JobImage, JobRequest, Status

# The placeholder for a prompt that cannot be read.
UNREADABLE = "(not readable)"


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
    request = _request(row)
    images = [JobImage(index=index, seed=(request.seed or 0) + index) for index in range(row["n"])]
    done = "SELECT picture, image FROM pictures WHERE job = ? AND file IS NOT NULL"
    for picture in db.execute(done, (row["number"],)):
        with contextlib.suppress(ValidationError):
            images[picture["picture"]] = JobImage.model_validate_json(picture["image"])
    error = None
    if row["error"]:
        error = JobError.model_construct(code="internal", message=row["error"][:1000])
        with contextlib.suppress(ValidationError):
            error = JobError.model_validate_json(row["error"])
    return Job(
        request=request,
        images=images,
        error=error,
        **{name: row[name] for name in ("id", "status", "created", "started", "finished", "expires", "attempt")},
    )


def _request(row: sqlite3.Row) -> JobRequest:
    """A job's request; if another version wrote it, only the known fields."""
    with contextlib.suppress(ValidationError):
        return JobRequest.model_validate_json(row["request"])
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        fields = json.loads(row["request"])
        return JobRequest.model_validate({name: fields[name] for name in JobRequest.model_fields if name in fields})
    return JobRequest(model=row["model"], prompt=UNREADABLE, n=row["n"], seed=0)
