"""The first module that a fork server imports: it and the ranks forked from it leave out what libraries chatter."""

from .chatter import chatter_off

chatter_off()
