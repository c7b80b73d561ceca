"""The first module that a fork server imports: it and the ranks forked from it leave out what libraries chatter."""

from __future__ import annotations

from .log_filter import hide_chatter

hide_chatter()
